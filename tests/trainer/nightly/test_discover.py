"""What is new, what a night trains on and what judges it: whatever the files are called, and over many nights."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from storage.location import locate
from tasks.trainer.champion import Champion
from tasks.trainer.data.prepared import prompt_id
from tasks.trainer.data.read import read_conversations
from tasks.trainer.errors import InputError
from tasks.trainer.nightly.home import FIXED, RECENT, TRAIN, VALIDATION, Discovery, Home, Plan, Verdict
from tasks.trainer.nightly.plan import discover
from tests.trainer.nightly.conftest import Killed, MakeConfig, entry_of, line, stop_before, write_lines

Night = dict[str, list[dict[str, Any]]]


def night_of(home: Home, plan: Plan) -> Night:
    """The night's files as they lie on the disk."""
    folder = Path(home.night(plan.number).path)
    return {
        name: [json.loads(each) for each in (folder / name).read_text().splitlines()]
        for name in (TRAIN, VALIDATION, FIXED, RECENT)
    }


def prompts(lines: list[dict[str, Any]]) -> set[str]:
    return {each["messages"][0]["content"] for each in lines}


def end(home: Home, found: Discovery, *, promote: bool) -> None:
    """As the night would end, but without a draft."""
    assert found.plan is not None
    plan = found.plan
    if promote:
        champion = Champion(home.place)
        history, version = champion.read()
        number = len(history.entries) + 1
        entry = entry_of(
            number, plan.number, f"digest{number}", replaced=history.champion, fingerprint=plan.fingerprint
        )
        assert champion.promote(entry, version=version, history=history)
    home.write_verdict(Verdict(plan.number, "promoted" if promote else "not_promoted", ("because",)))


def test_each_conversation_has_one_use_for_ever(make_config: MakeConfig, tmp_path: Path) -> None:
    """Red when a prompt that judges is trained on, in the same night or a later one, or a held-out one of the fixed set
    is; when keys of a line beside its messages are lost; or when a night trains on what it was not given."""
    config = make_config()
    judged: set[str] = set()
    trained: set[str] = set()
    with Home.open(config.nightly.home).hold() as home:
        for night in range(4):
            lines = [line(number, domain="eagles") for number in range(night * 40, night * 40 + 40)]
            # Prompts of the fixed set come in, and prompts of nights before with another answer.
            lines += [line(1000 + night, answer="other"), *(line(n, answer=f"again {night}") for n in range(night * 5))]
            write_lines(tmp_path / f"logs/{night}.jsonl", lines)
            found = discover(config, home)
            assert found.plan is not None, found.message
            files = night_of(home, found.plan)
            judged |= prompts(files[RECENT]) | prompts(files[VALIDATION]) | prompts(files[FIXED])
            trained |= prompts(files[TRAIN])
            assert not judged & trained
            assert all(each.get("domain") == "eagles" or "again" in each["messages"][1]["content"]
                       for each in files[TRAIN])  # fmt: skip
            assert found.plan.counts["new"] == 41 + night * 5
            assert found.plan.counts["fixed_prompts_left_out"] == night + 1
            assert len(files[FIXED]) == 10
            # Only what is new judges.
            new = {f"prompt {n}" for n in (*range(night * 40, night * 40 + 40), *range(night * 5))}
            assert prompts(files[RECENT]) <= new
            end(home, found, promote=night % 2 == 0)


def test_a_moved_renamed_or_compressed_conversation_is_not_new(make_config: MakeConfig, tmp_path: Path) -> None:
    """Red when what is new is told by file names, times, line numbers or the spelling of a line's JSON."""
    config = make_config()
    lines = [line(number) for number in range(60)]
    write_lines(tmp_path / "logs/a.jsonl", lines)
    with Home.open(config.nightly.home).hold() as home:
        end(home, discover(config, home), promote=True)
        shutil.move(tmp_path / "logs/a.jsonl", tmp_path / "elsewhere.jsonl")
        half = json.dumps(lines[0], separators=(",", ":"), sort_keys=True)
        write_lines(tmp_path / "logs/deep/b.jsonl", reversed(lines[:30]))
        (tmp_path / "logs/deep/b.jsonl").write_text(half + "\n" + (tmp_path / "logs/deep/b.jsonl").read_text())
        packed = "".join(json.dumps({**each, "id": 7}) + "\n" for each in lines[30:]).encode()
        (tmp_path / "logs/c.jsonl.gz").write_bytes(gzip.compress(packed))
        (tmp_path / "logs/empty.jsonl").write_text("")
        again = make_config(data={"source": str(tmp_path / "logs/**/*.jsonl*")})
        found = discover(again, home)
        assert found.plan is None
        assert found.message == "nothing new: all 60 conversations were there before"
        assert home.numbers() == [1]
        # One more turn makes another conversation.
        longer = {"messages": [*lines[0]["messages"], *lines[1]["messages"]]}
        write_lines(tmp_path / "logs/d.jsonl", [longer])
        assert discover(again, home).counts["new"] == 1


def test_too_few_wait_for_the_next_night(make_config: MakeConfig, tmp_path: Path) -> None:
    """Red when a night with too little to learn or to judge is run all the same, or its conversations are then lost."""
    config = make_config(nightly={"min_new": 50})
    write_lines(tmp_path / "logs/a.jsonl", (line(number) for number in range(49)))
    with Home.open(config.nightly.home).hold() as home:
        found = discover(config, home)
        assert found.plan is None
        assert "49 new conversations are fewer than nightly.min_new=50" in found.message
        write_lines(tmp_path / "logs/b.jsonl", [line(49)])
        judging = discover(make_config(nightly={"min_new": 50, "min_recent": 40}), home)
        assert judging.plan is None
        assert "fewer than nightly.min_recent=40" in judging.message
        found = discover(config, home)
        assert found.plan is not None
        assert found.plan.counts["new"] == 50


def test_what_failed_the_gate_is_learned_again_and_what_passed_is_replayed(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Red when a night's conversations are lost to the champion because its draft was not promoted; when replay takes
    another share than asked for; or when it draws the same ones every night."""
    config = make_config(nightly={"replay": 0.25})
    replayed = []
    with Home.open(config.nightly.home).hold() as home:
        for night, promote in enumerate((True, False, True, True)):
            write_lines(tmp_path / f"logs/{night}.jsonl", (line(n) for n in range(night * 100, night * 100 + 100)))
            found = discover(config, home)
            assert found.plan is not None
            numbers = {int(prompt.split()[1]) for prompt in prompts(night_of(home, found.plan)[TRAIN])}
            counts = found.plan.counts
            learned = {0: set(), 1: {0}, 2: {0}, 3: {0, 1, 2}}[night]
            fresh = {number for number in numbers if number // 100 not in learned}
            assert {number // 100 for number in fresh} == {0: {0}, 1: {1}, 2: {1, 2}, 3: {3}}[night]
            assert len(fresh) == counts["fresh"]
            assert counts["replayed"] == len(numbers) - len(fresh) == (round(len(fresh) / 3) if night else 0)
            replayed.append(numbers - fresh)
            end(home, found, promote=promote)
    assert not replayed[1] <= replayed[2]


def test_a_rollback_makes_what_was_given_up_fresh_again(make_config: MakeConfig, tmp_path: Path) -> None:
    """Red when what a draft learned that is the champion no more is taken for learned."""
    config = make_config()
    with Home.open(config.nightly.home).hold() as home:
        for night in range(2):
            write_lines(tmp_path / f"logs/{night}.jsonl", (line(n) for n in range(night * 100, night * 100 + 100)))
            end(home, discover(config, home), promote=True)
            for entry in home.champion.history().entries:
                home.champion.folder(entry).write_bytes("config.json", b"{}")
        assert discover(config, home).plan is None
        home.champion.roll_back()
        assert discover(config, home).plan is None, "nothing new came"
        write_lines(tmp_path / "logs/2.jsonl", (line(n) for n in range(200, 220)))
        found = discover(config, home)
        assert found.plan is not None
        assert found.plan.champion == 1
        numbers = {int(prompt.split()[1]) // 100 for prompt in prompts(night_of(home, found.plan)[TRAIN])}
        assert numbers == {0, 1, 2}
        assert found.plan.counts["fresh"] > 50


def test_a_new_revision_of_the_target_makes_everything_new(make_config: MakeConfig, tmp_path: Path) -> None:
    """Red when another target's states count as captured and learned, or a prompt that the champion learned judges."""
    write_lines(tmp_path / "logs/a.jsonl", (line(number) for number in range(100)))
    config = make_config()
    with Home.open(config.nightly.home).hold() as home:
        first = discover(config, home)
        assert first.plan is not None
        assert not first.plan.new_target
        trained = prompts(night_of(home, first.plan)[TRAIN])
        end(home, first, promote=True)
        other = make_config(target={"aux_layer_ids": [0, 1, 2]}, nightly={"recent_heldout": 0.5})
        found = discover(other, home)
        assert found.plan is not None
        assert found.plan.new_target
        assert found.plan.fingerprint != first.plan.fingerprint
        assert found.plan.counts["new"] == 100
        assert found.plan.counts["replayed"] == 0
        # The larger share of recent prompts reaches into what the champion was trained on.
        assert found.plan.counts["learned_prompts_left_out"] > 0
        assert not prompts(night_of(home, found.plan)[RECENT]) & trained


def test_a_night_that_was_killed_goes_on_from_the_same_data(make_config: MakeConfig, tmp_path: Path) -> None:
    """Red when a rerun plans another night, or lets in what came meanwhile; or goes on although champion, target or a
    setting that decides the result is another one."""
    config = make_config()
    write_lines(tmp_path / "logs/a.jsonl", (line(number) for number in range(100)))
    with Home.open(config.nightly.home).hold() as home:
        first = discover(config, home)
        write_lines(tmp_path / "logs/b.jsonl", (line(number) for number in range(100, 200)))
        again = discover(make_config(nightly={"significance": 0.01, "keep_nights": 2}), home)
        assert again.plan == first.plan
        assert "goes on" in again.message
        changed = discover(make_config(train={"steps": 5}), home)
        assert changed.plan is not None
        assert changed.plan.number == 2
        assert changed.plan.counts["new"] == 200, "what a night had that was given up is new"
        verdict = home.verdict(1)
        assert verdict is not None
        assert verdict.outcome == "abandoned"
        assert "settings" in verdict.reasons[0]


def test_a_night_killed_while_it_is_planned_is_planned_again(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a plan counts before its data is there, or what was half written is taken for a night."""
    config = make_config()
    write_lines(tmp_path / "logs/a.jsonl", (line(number) for number in range(100)))
    trial, plan = 0, None
    while plan is None:
        with monkeypatch.context() as patch:
            stop_before(patch, trial)
            try:
                with Home.open(config.nightly.home).hold() as home:
                    plan = discover(config, home).plan
            except Killed:
                assert Home.open(config.nightly.home).numbers() == []
        trial += 1
    assert trial == 8, "4 files, 2 of ids and the plan"
    assert plan.number == 1
    files = night_of(Home.open(config.nightly.home), plan)
    assert len(files[TRAIN]) == plan.counts["trained"] == plan.counts["fresh"]


def test_the_fixed_set_is_the_same_every_night_without_copies(make_config: MakeConfig, tmp_path: Path) -> None:
    """Red when the chosen prompts of the fixed set change from night to night, or one prompt judges twice."""
    write_lines(tmp_path / "fixed.jsonl", [*(line(n) for n in range(1000, 1030)), line(1000, answer="twice")])
    config = make_config(nightly={"num_prompts": 12})
    chosen = []
    with Home.open(config.nightly.home).hold() as home:
        for night in range(2):
            write_lines(tmp_path / f"logs/{night}.jsonl", (line(n) for n in range(night * 60, night * 60 + 60)))
            found = discover(config, home)
            assert found.plan is not None
            chosen.append((found.plan.fixed_digest, prompts(night_of(home, found.plan)[FIXED])))
            end(home, found, promote=True)
    assert chosen[0] == chosen[1]
    assert len(chosen[0][1]) == 12


def test_a_source_on_s3_is_read_and_what_comes_is_seen(s3: Any, make_config: MakeConfig) -> None:
    """Red when a glob works on disks only, or a listing of yesterday is used today."""
    place = locate(s3.new_url())
    config = make_config(data={"source": f"{place.url}/chats/*/*.jsonl.gz"})
    with Home.open(config.nightly.home).hold() as home:
        for day in range(2):
            lines = "".join(json.dumps(line(number)) + "\n" for number in range(day * 60, day * 60 + 60))
            place.write_bytes(f"chats/{day}/a.jsonl.gz", gzip.compress(lines.encode()))
            found = discover(config, home)
            assert found.plan is not None
            assert (found.plan.counts["files"], found.plan.counts["new"]) == (day + 1, 60)
            end(home, found, promote=True)


def test_mistakes_name_the_way_out(make_config: MakeConfig, tmp_path: Path) -> None:
    """Red when a glob without files, a share without prompts or a damaged line is a traceback, or shows a text."""
    config = make_config()
    with Home.open(config.nightly.home).hold() as home:
        with pytest.raises(InputError, match="matches no file"):
            discover(config, home)
        write_lines(tmp_path / "logs/a.jsonl", (line(number) for number in range(60)))
        with pytest.raises(InputError, match=r"data\.heldout_fraction=0\.001"):
            discover(make_config(data={"heldout_fraction": 0.001}), home)
        (tmp_path / "logs/b.jsonl").write_text('{"messages": [{"role": "user", "content": "secret"')
        with pytest.raises(InputError, match=r"b\.jsonl, line 1") as refused:
            discover(config, home)
        assert "secret" not in str(refused.value)
        assert discover(make_config(data={"on_error": "skip"}), home).plan is not None


def test_ids_do_not_depend_on_the_file(tmp_path: Path) -> None:
    """Red when prompt ids, which decide what judges, follow the file's name or the line's number."""
    first = write_lines(tmp_path / "a.jsonl", [line(1), line(2)])
    second = write_lines(tmp_path / "b.jsonl", [line(2, answer="other"), line(1)])
    ids = [{prompt_id(c) for c in read_conversations([str(path)])[0]} for path in (first, second)]
    assert ids[0] == ids[1]
