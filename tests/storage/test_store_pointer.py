"""Compare-and-swap of one file: of many that read the same version one wins; where that cannot be had, it is said."""

from __future__ import annotations

import multiprocessing
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from storage.errors import StoreError
from storage.location import locate
from storage.pointer import Version, check_swappable, read_version, swap


def add_one(url: str, times: int) -> int:
    """Count up a number in a file, reading it again whenever another one was faster; how often that was."""
    place, lost = locate(url), 0
    for _ in range(times):
        while True:
            version = read_version(place, "number")
            number = int((version.content or b"0").split()[0]) + 1
            if swap(place, "number", f"{number} {uuid.uuid4()}".encode(), expected=version):
                break
            lost += 1
    return lost


def add_in_processes(url: str, *, workers: int, times: int) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=add_one, args=(url, times)) for _ in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def test_no_change_on_a_disk_is_lost(tmp_path: Path) -> None:
    """Red when two processes that read the same version both replace it. Processes: a lock of threads would not do."""
    add_in_processes(str(tmp_path), workers=3, times=40)
    assert (tmp_path / "number").read_bytes().split()[0] == b"120"


def test_no_change_on_s3_is_lost(s3) -> None:
    """Red when the put carries no condition, or a refused one is taken for done; requests fail now and then."""
    url = s3.new_url()
    place = locate(url)
    check_swappable(place)
    s3.set(hang_up=0.05, cut=0.05, seed=1)
    with ThreadPoolExecutor(4) as executor:
        lost = list(executor.map(lambda _: add_one(url, 6), range(4)))
    s3.set()
    assert place.read_bytes("number").split()[0] == b"24"
    assert sum(lost) > 0, "nobody was ever too late, so nothing was tried"
    assert place.names() == ["number"], "the probe is removed"


@pytest.mark.parametrize("start", [b"old", None])
def test_a_stale_version_is_refused(tmp_path: Path, start: bytes | None) -> None:
    """Red when a swap does not compare, or a refused one leaves a trace."""
    place = locate(str(tmp_path))
    if start is not None:
        place.write_bytes("number", start)
    version = read_version(place, "number")
    assert swap(place, "number", b"first", expected=version)
    assert not swap(place, "number", b"second", expected=version)
    assert read_version(place, "number") == Version(b"first")
    assert [name for name in place.names() if not name.startswith(".")] == ["number"]


def test_a_stale_version_is_refused_on_s3(s3) -> None:
    """Red when the server is asked for the wrong condition, for a new file or an old one."""
    place = locate(s3.new_url())
    nothing = read_version(place, "number")
    assert nothing == Version(None)
    assert swap(place, "number", b"first", expected=nothing)
    assert not swap(place, "number", b"second", expected=nothing)
    version = read_version(place, "number")
    assert version.content == b"first"
    assert swap(place, "number", b"second", expected=version)
    assert not swap(place, "number", b"third", expected=version)
    assert place.read_bytes("number") == b"second"


def test_a_server_that_ignores_conditions_is_refused(s3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a server is trusted that takes every put."""
    import s3fs

    async def careless(self: Any, method: str, *arguments: Any, **named: Any) -> Any:
        condition = [named.pop(name, None) for name in ("IfMatch", "IfNoneMatch")]
        conditions.extend(filter(None, condition))
        return await honest(self, method, *arguments, **named)

    conditions: list[str] = []
    honest = s3fs.S3FileSystem._call_s3
    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", careless)
    place = locate(s3.new_url())
    with pytest.raises(StoreError, match="whose condition"):
        check_swappable(place)
    assert conditions
    assert place.names() == []


def test_other_places_are_refused() -> None:
    """Red when a pointer is kept where nothing compares."""
    with pytest.raises(StoreError, match="compare-and-swap"):
        check_swappable(locate("memory://champions"))
