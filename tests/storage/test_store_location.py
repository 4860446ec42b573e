"""Places: which URLs are served, what each kind of place promises, and that no password is ever repeated."""

from __future__ import annotations

import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from storage.errors import StoreError
from storage.location import Location, locate
from storage.retry import is_transient, scrubbed
from storage.writer import StoreWriter
from tests.storage.s3_server import BUCKET


@pytest.mark.parametrize(
    "url",
    [
        "https://user:hunter2@host/store",
        "s3://AKIA:hunter2@bucket/store",
        "s3://AKIA:hun/ter2@bucket/store",
        "simplecache::s3://AKIA:hunter2@bucket",
        "file://user:hunter2@host/store",
        "memory://user:hunter2@store",
        "gs://user:hunter2@bucket/store",
    ],
)
def test_user_info_is_refused_before_anything_is_written(url, make_spec, tmp_path, monkeypatch):
    # Red when a URL with a password is accepted, written to, or repeated in the message (and so in logs).
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="user info") as refused:
        StoreWriter(url, make_spec())
    assert "ter2" not in str(refused.value)
    assert "AKIA" not in str(refused.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("simplecache::s3://b/a", "scheme simplecache:: are not served"),
        ("https://host/store", "scheme https:// are not served"),
        ("nosuch://b/a", "scheme nosuch:// are not served"),
    ],
)
def test_other_schemes_are_named(url, message):
    # Red when an unserved scheme becomes a folder of that name, or the message does not say which it was.
    with pytest.raises(StoreError, match=message):
        locate(url)


def test_a_missing_package_is_named(monkeypatch):
    # Red when s3:// without s3fs is a bare ImportError, or does not say what to install.
    def filesystem(scheme: str, **options: object) -> object:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "filesystem", filesystem)
    with pytest.raises(StoreError, match=r"s3:// need another package: pip install 'eyas\[s3\]'"):
        locate("s3://bucket/store")
    with pytest.raises(StoreError, match="gs:// need another package"):
        locate("gs://bucket/store")


@pytest.mark.parametrize("url", ["", "memory://", "file://", "file:///", "/", "s3://", "file://relative/path"])
def test_urls_without_a_folder_are_refused(url):
    # Red when the root of a file system, the working folder or a host name is taken for a store.
    with pytest.raises(StoreError, match=r"names no folder|must be file:///"):
        locate(url)


def test_one_place_has_one_path(tmp_path, monkeypatch):
    # Red when the plain, relative, home and file:// forms of a path lead to different stores.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    want = str(tmp_path / "store")
    for url in (want, f"{want}/", f"file://{want}", f"FILE://{want}/", "store", "./x/../store", "~/store"):
        assert locate(url).path == want
    assert locate(f"{tmp_path}/user@host").path == f"{tmp_path}/user@host"
    assert locate("memory://a/b/") == locate("memory://a/b")


class LocationContract:
    """What a writer and a reader rely on, wherever the store lies. Subclasses give `place`: a new, empty one."""

    def test_files_are_put_whole_and_read_by_ranges(self, place: Location):
        # Red when parts are put in another order, or a range is off by one or fails past the end.
        place.write_bytes("deep/name", b"0123", b"456789")
        assert place.read_bytes("deep/name") == b"0123456789"
        assert place.read_bytes("deep/name", 2, 5) == b"234"
        assert place.read_bytes("deep/name", 0, 11) == b"0123456789"
        assert place.read_bytes("deep/name", 8, 20) == b"89"
        place.write_bytes("deep/name", b"new")
        assert place.read_bytes("deep/name") == b"new"

    def test_what_is_not_there_is_none_and_empty(self, place: Location):
        # Red when a missing file is an error: it is how readers learn that there is no store yet.
        assert place.read_bytes("none") is None
        assert place.read_bytes("none", 0, 4) is None
        assert place.names() == []
        assert place.child("none").names() == []
        assert not place.exists("none")
        assert place.sizes() == {}
        assert place.total_bytes() == 0
        place.delete("none")

    def test_listing_shows_what_is_directly_inside(self, place: Location):
        # Red when names are nested, doubled, or include the folder itself; index files are found this way.
        for name in ("b/one", "b/two", "a", "b/c/three"):
            place.write_bytes(name, name.encode())
        assert place.names() == ["a", "b"]
        assert place.child("b").names() == ["c", "one", "two"]
        assert place.exists("b")
        assert place.exists("b/c/three")
        assert place.sizes() == {"a": 1, "b/one": 5, "b/two": 5, "b/c/three": 9}
        assert place.child("b").total_bytes() == 19
        place.delete("b/one")
        assert place.child("b").names() == ["c", "two"]

    def test_whole_files_go_up_and_down(self, place: Location, tmp_path):
        """Red when bytes differ, an old file shines through, or a failed download leaves a file or half of one."""
        source, target = tmp_path / "source", tmp_path / "target"
        for content in (b"", bytes(range(256)) * 4_000, b"shorter"):
            source.write_bytes(content)
            place.upload("folder/file.bin", source)
            assert place.read_bytes("folder/file.bin") == content
            place.download("folder/file.bin", target)
            assert target.read_bytes() == content
        with pytest.raises(FileNotFoundError):
            place.download("folder/none.bin", target)
        assert target.read_bytes() == b"shorter"
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["source", "target"]

    def test_many_threads_at_once(self, place: Location):
        # Red when requests from several threads mix up.
        with ThreadPoolExecutor(16) as executor:
            list(executor.map(lambda i: place.write_bytes(f"f/{i}", str(i).encode()), range(50)))
            place.make_durable([f"f/{i}" for i in range(50)], executor)
            assert list(executor.map(lambda i: place.read_bytes(f"f/{i}"), range(50))) == [
                str(i).encode() for i in range(50)
            ]


class TestLocal(LocationContract):
    @pytest.fixture
    def place(self, tmp_path) -> Location:
        return locate(f"{tmp_path}/new/place")

    def test_a_put_is_a_rename_and_leaves_no_temporary(self, place: Location):
        # Red when a file is written in place (a second name of the old one would change with it), or leaves a trace.
        place.write_bytes("name", b"old")
        os.link(f"{place.path}/name", f"{place.path}/old")
        place.write_bytes("name", b"new")
        assert place.read_bytes("old") == b"old"
        Path(place.path, "folder").mkdir()
        with pytest.raises(OSError, match="folder"):
            place.write_bytes("folder", b"in the way")
        assert place.names() == ["folder", "name", "old"]


class TestMemory(LocationContract):
    @pytest.fixture
    def place(self) -> Location:
        return locate(f"memory://places/{uuid.uuid4().hex}")


class TestS3(LocationContract):
    @pytest.fixture
    def place(self, s3) -> Location:
        return locate(s3.new_url())

    def test_one_request_a_file(self, s3, place: Location):
        # Red when a read asks for the size first (40 ms a shard), or a put for the bucket.
        faults = s3.set()
        place.write_bytes("name", b"0123456789")
        assert place.read_bytes("name", 0, 11) == b"0123456789"
        assert place.read_bytes("name") == b"0123456789"
        assert [line.split()[0] for line in faults.requests] == ["PUT", "GET", "GET"]

    def test_a_missing_bucket_is_told_at_once(self, s3):
        # Red when what will never pass is waited for, or a bucket is made by itself.
        faults = s3.set()
        place = locate("s3://no-such-bucket-here/store")
        with pytest.raises(OSError, match="no such bucket"):
            place.write_bytes("name", b"x")
        assert len(faults.requests) == 1
        assert place.read_bytes("name") is None

    @pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
    def test_refused_credentials_are_told_at_once_and_not_repeated(self, s3, wrong, monkeypatch):
        # Red when a wrong key is tried for two minutes, or shows up in the message.
        monkeypatch.setenv(wrong, "WRONG12345")
        fsspec.filesystem("s3").clear_instance_cache()
        faults = s3.set()
        with pytest.raises(OSError, match="check that the environment's credentials") as refused:
            locate(f"s3://{BUCKET}/store").write_bytes("name", b"x")
        assert len(faults.requests) == 1
        assert "WRONG12345" not in str(refused.value)
        fsspec.filesystem("s3").clear_instance_cache()

    def test_what_passes_is_tried_again(self, s3, place: Location):
        # Red when a 503, a hung up connection or half an answer reaches the caller.
        s3.set(refuse=0.15, hang_up=0.1, cut=0.1, seed=1)
        for i in range(12):
            place.write_bytes(f"f/{i}", str(i).encode() * 100)
        for i in range(12):
            assert place.read_bytes(f"f/{i}", 0, 300) == str(i).encode() * 100
        assert place.child("f").names() == sorted(str(i) for i in range(12))

    def test_what_does_not_pass_in_time_is_told(self, s3, place: Location, monkeypatch):
        # Red when a server that stays away is waited for without end.
        monkeypatch.setattr("storage.retry.RETRY_SECONDS", 1.0)
        s3.set(refuse=1.0)
        with pytest.raises(OSError, match=r"injected; it did not pass within 1 s"):
            place.write_bytes("name", b"x")


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionResetError(104, "reset"), True),
        (TimeoutError("slow"), True),
        (OSError(16, "Please reduce your request rate"), True),
        (OSError(28, "No space left on device"), False),
        (PermissionError(13, "Access Denied"), False),
        (FileNotFoundError(2, "no such bucket"), False),
        (OSError(22, "Invalid argument"), False),
        (EOFError("incomplete"), True),
    ],
)
def test_what_passes_and_what_does_not(error, passes):
    # Red when a full disk is waited for, or a reset ends a capture of hours.
    assert is_transient(error) is passes


def test_credentials_are_scrubbed_from_what_a_backend_says():
    # Red when a signed URL, a key or a header gets into a message.
    text = scrubbed(
        OSError("GET https://me:pass@host/x?X-Amz-Signature=abc123&X-Amz-Credential=AKIAABCDEFGHIJKLMNOP%2F failed")
    )
    for secret in ("pass@", "abc123", "AKIAABCDEFGHIJKLMNOP"):
        assert secret not in text
    assert "failed" in text
    assert "s3cret" not in scrubbed(OSError("Authorization: Bearer s3cret"))


def test_no_thread_is_left_by_a_location(tmp_path):
    # Red when a local place starts fsspec's event loop, which a fork would then copy half of.
    before = threading.active_count()
    locate(str(tmp_path)).write_bytes("a", b"b")
    assert threading.active_count() == before
