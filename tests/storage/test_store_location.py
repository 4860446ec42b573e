"""Which URLs are served, and that a refused one neither writes anything nor repeats a password."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage.errors import StoreError
from storage.location import locate
from storage.writer import StoreWriter


@pytest.mark.parametrize(
    "url",
    [
        "https://user:hunter2@host/store",
        "s3://AKIA:hunter2@bucket/store",
        "s3://AKIA:hun/ter2@bucket/store",
        "user@example::s3://AKIA:hunter2@bucket",
        "simplecache::s3://AKIA:hunter2@bucket",
        "file://user:hunter2@host/store",
        "memory://user:hunter2@store",
    ],
)
def test_user_info_is_refused_before_anything_is_written(url, make_spec, tmp_path, monkeypatch):
    # Red when a URL with a password is accepted, written to, or repeated in the message (and so in logs).
    monkeypatch.chdir(tmp_path)
    if url.startswith("user@"):
        url = url.removeprefix("user@example::")
    with pytest.raises(StoreError, match="user info") as refused:
        StoreWriter(url, make_spec())
    assert "ter2" not in str(refused.value)
    assert "AKIA" not in str(refused.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("url", "scheme"), [("s3://bucket/a", "s3"), ("GS://b/a", "gs"), ("zip::s3://b", "zip")])
def test_other_schemes_are_named(url, scheme):
    # Red when an unserved scheme becomes a folder of that name, or the message does not say which it was.
    with pytest.raises(StoreError, match=f"scheme {scheme}:// are not served"):
        locate(url)


@pytest.mark.parametrize("url", ["", "memory://", "file://", "file:///", "/", "file://relative/path"])
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


def test_write_bytes_replaces_whole_and_leaves_no_temporary(tmp_path: Path):
    # Red when a put is not a rename (a second name of the old file would change with it), or leaves its temporary.
    location = locate(str(tmp_path))
    location.write_bytes("deep/name", b"old")
    os.link(tmp_path / "deep/name", tmp_path / "old")
    location.write_bytes("deep/name", b"new")
    assert (tmp_path / "old").read_bytes() == b"old"
    assert location.read_bytes("deep/name") == b"new"
    assert location.child("deep").names() == ["name"]
    (tmp_path / "deep" / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        location.write_bytes("deep/folder", b"in the way")
    assert location.child("deep").names() == ["folder", "name"]
