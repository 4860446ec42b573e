"""The champion's file: one pointer with its history, on a disk and on S3; back and forth, and never half."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from storage.errors import StoreError
from storage.location import locate
from tasks.trainer.champion import CHAMPION, Champion, Entry, open_home
from tasks.trainer.champion_cli import app
from tasks.trainer.errors import InputError
from tasks.trainer.parent import parent_digest
from tests.trainer.nightly.conftest import entry_of, write_draft


@pytest.fixture(params=["disk", "s3"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A home's URL, empty."""
    if request.param == "disk":
        return str(tmp_path / "home")
    url: str = request.getfixturevalue("s3").new_url()
    return url


def promote(champion: Champion, draft: Path, night: int) -> Entry:
    digest = parent_digest(str(draft))
    champion.publish(draft, digest)
    history, version = champion.read()
    entry = entry_of(len(history.entries) + 1, night, digest, replaced=history.champion)
    assert champion.promote(entry, version=version, history=history)
    return entry


def test_promotions_roll_back_and_forth(home: str, tmp_path: Path) -> None:
    """Red when the pointer names another draft than was promoted, a rollback forgets or deletes one, or going back
    twice ends where it began."""
    champion = Champion(open_home(home))
    assert champion.history().current is None
    entries = [promote(champion, write_draft(tmp_path / f"d{n}", content=n), n) for n in (1, 2, 3)]
    history = champion.history()
    assert history.current == entries[2]
    assert history.lineage() == tuple(reversed(entries))
    assert champion.roll_back() == (entries[2], entries[1])
    assert champion.roll_back() == (entries[1], entries[0])
    with pytest.raises(InputError, match="is the first one"):
        champion.roll_back()
    assert champion.roll_back(3) == (entries[0], entries[2])
    with pytest.raises(InputError, match="holds 1, 2, 3"):
        champion.roll_back(7)
    with pytest.raises(InputError, match="is the champion already"):
        champion.roll_back(3)
    history = champion.history()
    assert history.entries == tuple(entries)
    assert [(change.kind, change.entry, change.before) for change in history.changes] == [
        ("promoted", 1, None), ("promoted", 2, 1), ("promoted", 3, 2),
        ("rolled_back", 2, 3), ("rolled_back", 1, 2), ("rolled_back", 3, 1),
    ]  # fmt: skip
    for number, entry in enumerate(entries, start=1):
        folder = champion.local_folder(entry, tmp_path / "scratch")
        assert (folder / "model.safetensors").read_bytes() == (tmp_path / f"d{number}/model.safetensors").read_bytes()


def test_of_two_that_read_the_same_file_one_changes_it(home: str, tmp_path: Path) -> None:
    """Red when a promotion undoes another one, or a rollback, that came between."""
    champion = Champion(open_home(home))
    first = promote(champion, write_draft(tmp_path / "d1", content=1), 1)
    history, version = champion.read()
    champion.record_measurement(first, {"fingerprint": "new", "tau": 1.5})
    late = entry_of(2, 2, "digest", replaced=1)
    assert not champion.promote(late, version=version, history=history)
    now = champion.history()
    assert now.entries == (first,)
    assert now.is_measured(first, "new")
    assert not now.is_measured(first, "newer")


def test_many_at_once_lose_no_change(tmp_path: Path) -> None:
    """Red when record_measurement gives up or overwrites. On a disk; S3's is storage's test."""
    champion = Champion(open_home(str(tmp_path / "home")))
    entry = promote(champion, write_draft(tmp_path / "d1"), 1)
    threads = [
        threading.Thread(target=champion.record_measurement, args=(entry, {"fingerprint": str(number)}))
        for number in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = champion.history()
    assert all(history.is_measured(entry, str(number)) for number in range(6))


def test_a_draft_that_is_not_the_one_judged_is_refused(tmp_path: Path) -> None:
    """Red when what is published, served or started from may differ from what was measured."""
    champion = Champion(open_home(str(tmp_path / "home")))
    draft = write_draft(tmp_path / "d1", content=1)
    digest = parent_digest(str(draft))
    with pytest.raises(InputError, match="not the draft that was judged"):
        champion.publish(write_draft(tmp_path / "d2", content=2), digest)
    assert champion.home.names() == []
    entry = promote(champion, draft, 1)
    folder = Path(champion.folder(entry).path)
    (folder / "model.safetensors").write_bytes((tmp_path / "d2/model.safetensors").read_bytes())
    with pytest.raises(InputError, match="not the draft that champion 1 was promoted as"):
        champion.local_folder(entry, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged"),
        (b"[1]", "is damaged"),
        (b'{"format": 9}', "format 9"),
        (b'{"format": 1, "champion": 2, "entries": [], "changes": []}', "no champion 2"),
        (b'{"format": 1, "champion": null, "entries": [{"number": 1}], "changes": []}', "is damaged"),
    ],
)
def test_a_damaged_file_is_no_empty_history(tmp_path: Path, content: bytes, message: str) -> None:
    """Red when a file that cannot be read is taken for a first night, which would forget every champion."""
    place = open_home(str(tmp_path))
    place.write_bytes(CHAMPION, content)
    with pytest.raises(InputError, match=message):
        Champion(place).history()


def test_places_that_cannot_compare_are_refused() -> None:
    """Red when a home may lie where two promotions could undo each other."""
    with pytest.raises(StoreError, match="compare-and-swap"):
        Champion(locate("memory://home")).roll_back()


def run(arguments: list[str]) -> Any:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_the_commands_say_what_is_served(tmp_path: Path) -> None:
    """Red when show's first line is not the folder to serve, --json is not one object, or a mistake is a traceback."""
    champion = Champion(open_home(str(tmp_path / "home")))
    where = str(tmp_path / "home")
    for arguments in (["show", where], ["history", where], ["rollback", where]):
        with pytest.raises(InputError, match="no champion yet"):
            run(arguments)
    entries = [promote(champion, write_draft(tmp_path / f"d{n}", content=n), n) for n in (1, 2)]
    folders = [champion.folder(entry).url for entry in entries]
    assert run(["show", where]).output.splitlines()[0] == folders[1]
    assert json.loads(run(["rollback", where, "--json"]).output)["url"] == folders[0]
    assert json.loads(run(["show", where, "--json"]).output)["number"] == 1
    assert run(["rollback", where, "--to", "2"]).output == f"champion 1 was, champion 2 is: {folders[1]}\n"
    document = json.loads(run(["history", where, "--json"]).output)
    assert document["champion"] == 2
    assert [change["kind"] for change in document["changes"]] == ["promoted", "promoted", "rolled_back", "rolled_back"]
    lines = run(["history", where]).output.splitlines()
    assert len(lines) == 4
    assert "rolled back from champion 2 to 1" in lines[2]
