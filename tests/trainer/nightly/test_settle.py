"""The end of a night, killed before each of its writes in turn; what is kept, and what is thrown away."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.gc import collect
from storage.location import locate
from storage.writer import StoreWriter
from tasks.trainer.champion import CHAMPION, Champion
from tasks.trainer.config_nightly import NightlyConfig
from tasks.trainer.data.prepared import PreparedData, PreparedSample, sample_id
from tasks.trainer.errors import InputError
from tasks.trainer.files import write_json
from tasks.trainer.nightly import settle
from tasks.trainer.nightly.home import Home, Plan, Verdict, training_config
from tasks.trainer.nightly.plan import discover
from tasks.trainer.parent import parent_digest
from tasks.trainer.run_dir import RunDir
from tests.storage.conftest import BASE_SPEC, sample_of
from tests.trainer.nightly.conftest import Killed, MakeConfig, line, stop_before, write_draft, write_lines


def counts(forwards: float) -> list[dict[str, Any]]:
    """40 prompts of 20 tokens."""
    return [{"num_tokens": 20, "num_forwards": forwards, "tried": [], "accepted": []}] * 40


def train(config: NightlyConfig, home: Home, plan: Plan, *, forwards: float, store: str | None = None) -> list[str]:
    """What a night's run leaves, without training: an export, prepared data, receipts and a judgement. forwards: what
    its draft needs for 20 tokens; what it must beat needs 10. Returns the ids of what it was trained on."""
    run = RunDir.create(training_config(config, plan, home))
    shutil.rmtree(run.draft, ignore_errors=True)
    write_draft(run.draft, content=plan.number)
    random = np.random.default_rng(plan.number)
    samples = []
    for _ in range(6):
        tokens, mask = random.integers(0, 50, 12, dtype=np.int32), np.arange(12) > 4
        samples.append(PreparedSample(sample_id(tokens, mask), tokens, mask))
    PreparedData.write(run.train_data, samples[:4])
    PreparedData.write(run.heldout_data, samples[4:])
    if store is not None:
        with StoreWriter(store, BASE_SPEC) as writer:
            for sample in samples:
                writer.write(sample_of(sample.sample_id, 12))
        run.write_receipt("capture", {"store_url": store, "fingerprint": BASE_SPEC.fingerprint})
    rivals = ("champion", "ngram") if plan.champion else ("untrained", "ngram")
    judged = {"draft": counts(forwards), **{name: counts(10.0) for name in rivals}}
    document = {
        "digest": parent_digest(str(run.draft)),
        "night": plan.number,
        "champion": plan.champion,
        "sets": {name: {"counts": judged, "num_prompts": 40, "num_lossy": 0} for name in ("fixed", "recent")},
    }
    write_json(run.judgement, document)
    return [sample.sample_id for sample in samples]


def begin(config: NightlyConfig, home: Home, number: int) -> Plan:
    """A night with 60 new conversations."""
    write_lines(Path(config.data.source.partition("/**")[0], f"{number}.jsonl"),
                (line(n) for n in range(number * 60, number * 60 + 60)))  # fmt: skip
    found = discover(config, home)
    assert found.plan is not None, found.message
    return found.plan


def end(config: NightlyConfig, home: Home, plan: Plan) -> Verdict:
    verdict = settle.promote(config, home, plan)
    settle.finish(config, home, plan, verdict)
    return verdict


@pytest.fixture(params=["disk", "s3"])
def anywhere(request: pytest.FixtureRequest, make_config: MakeConfig, tmp_path: Path) -> NightlyConfig:
    """A config whose home lies on a disk, or on S3."""
    if request.param == "disk":
        return make_config()
    url: str = request.getfixturevalue("s3").new_url()
    config = make_config(nightly={"home": url, "keep_nights": 1})
    return config.model_copy(update={"scratch_dir": str(tmp_path / "scratch")})


def test_nights_promote_keep_and_turn_down(anywhere: NightlyConfig, tmp_path: Path) -> None:
    """Red when the gate's word is not what happens to the pointer, the report says something else, or a home on S3
    works otherwise than one on a disk."""
    config = anywhere
    with Home.open(config.nightly.home, config.scratch_dir).hold() as home:
        for number, forwards, outcome in (
            (1, 8.0, "promoted"), (2, 9.9, "promoted"), (3, 10.0, "not_promoted"), (4, 11.0, "not_promoted")
        ):  # fmt: skip
            plan = begin(config, home, number)
            train(config, home, plan, forwards=forwards)
            verdict = end(config, home, plan)
            assert verdict.outcome == outcome
            assert home.verdict(number) == verdict
            report = (home.night(number).read_bytes("report.md") or b"").decode()
            assert ("**Promoted**" in report) == (outcome == "promoted")
            assert verdict.reasons[0] in report
            assert "prompt 6" not in report
        history = home.champion.history()
        assert [entry.night for entry in history.entries] == [1, 2]
        assert history.champion == 2
        started_from = RunDir.create(training_config(config, plan, home)).config().draft.init
        assert started_from is not None
        assert parent_digest(started_from) == history.entry(2).digest
        assert discover(config, home).plan is None
        has_text = {number: home.night(number).exists("train.jsonl") for number in home.numbers()}
        assert has_text == {1: True, 2: True, 3: config.nightly.keep_nights > 1, 4: True}


def test_a_night_killed_before_any_of_its_writes_promotes_once(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when at some moment the pointer names what is not whole or not kept, or the rerun promotes again, or never.

    Every write, upload and removal of the end of a night is stopped before it happens, one in each trial; the rerun is
    a start of its own.
    """
    config = make_config(nightly={"keep_nights": 1})
    store = str(tmp_path / "store")
    with Home.open(config.nightly.home).hold() as home:
        for number in (1, 2):
            plan = begin(config, home, number)
            train(config, home, plan, forwards=8.0 if number == 1 else 11.0)
            end(config, home, plan)
        plan = begin(config, home, 3)
        trained = train(config, home, plan, forwards=7.0, store=store)
    before = tmp_path / "before"
    shutil.copytree(config.nightly.home, before / "home")
    shutil.copytree(store, before / "store")
    trial, done = 0, False
    while not done:
        for name in ("home", "store"):
            shutil.rmtree(tmp_path / name)
            shutil.copytree(before / name, tmp_path / name)
        with monkeypatch.context() as patch:
            stop_before(patch, trial)
            try:
                with Home.open(config.nightly.home).hold() as home:
                    end(config, home, plan)
                done = True
            except Killed:
                pass
        champion = Champion(locate(config.nightly.home))
        for entry in champion.history().entries:
            champion.local_folder(entry, tmp_path)  # raises when it is not whole
        if champion.history().champion == 2:
            collect(store, drop=[BASE_SPEC.fingerprint], min_age_s=0.0)
        with Home.open(config.nightly.home).hold() as home:
            if home.verdict(3) is None:
                found = discover(config, home)
                assert found.plan == plan
                assert end(config, home, plan).outcome == "promoted"
            history = home.champion.history()
            assert [(change.kind, change.entry) for change in history.changes] == [("promoted", 1), ("promoted", 2)]
            assert history.current is not None
            assert history.current.night == 3
            assert home.night(3).exists("report.md")
            settle.drop_old(home, history, keep=1)
            assert not home.night(2).exists("run")
            assert home.night(1).exists("run")
        kept = json.loads(next((tmp_path / "store/keep").iterdir()).read_text())["sample_ids"]
        assert sorted(kept) == sorted(trained)
        trial += 1
    assert trial > 8, "the end of a night has more writes than were stopped"


def test_garbage_collection_leaves_what_the_history_refers_to(make_config: MakeConfig, tmp_path: Path) -> None:
    """Red when `eyas store gc --drop` takes a sample that a draft of the history was trained on, a rolled-back one
    included, or keeps those of a night that promoted nothing."""
    config = make_config()
    store = str(tmp_path / "store")
    kept, free = set(), set()
    with Home.open(config.nightly.home).hold() as home:
        for number, forwards in ((1, 8.0), (2, 11.0), (3, 7.0)):
            plan = begin(config, home, number)
            ids = train(config, home, plan, forwards=forwards, store=store)
            promoted = end(config, home, plan).outcome == "promoted"
            (kept if promoted else free).update(ids)
        home.champion.roll_back()
    (garbage,) = collect(store, drop=[BASE_SPEC.fingerprint], min_age_s=0.0)
    assert set(garbage.dropped) == free
    assert len(free) == 6
    assert garbage.kept == len(kept) == 12


def test_a_rollback_while_a_night_is_under_way_is_not_undone(make_config: MakeConfig) -> None:
    """Red when a night promotes over a champion that it was not judged against; its conversations stay new."""
    config = make_config()
    with Home.open(config.nightly.home).hold() as home:
        for number in (1, 2):
            plan = begin(config, home, number)
            train(config, home, plan, forwards=9.0 - number)
            end(config, home, plan)
        plan = begin(config, home, 3)
        train(config, home, plan, forwards=5.0)
        home.champion.roll_back()
        verdict = end(config, home, plan)
        assert verdict.outcome == "abandoned"
        assert "the champion was 2 when the night began, and is 1 now" in verdict.reasons[0]
        assert home.champion.history().champion == 1
        found = discover(config, home)
        assert found.plan is not None
        assert (found.plan.number, found.plan.champion, found.plan.counts["new"]) == (4, 1, 60)


def test_a_change_of_the_file_between_reading_and_promoting_is_tried_again(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when somebody's measurement in the same second costs a promotion, or is lost."""
    config = make_config()
    with Home.open(config.nightly.home).hold() as home:
        plan = begin(config, home, 1)
        train(config, home, plan, forwards=8.0)
        end(config, home, plan)
        plan = begin(config, home, 2)
        train(config, home, plan, forwards=7.0)
        publish = Champion.publish

        def interrupted(self: Champion, draft: Path, digest: str) -> None:
            monkeypatch.setattr(Champion, "publish", publish)
            self.record_measurement(self.history().entry(1), {"fingerprint": "new"})
            publish(self, draft, digest)

        monkeypatch.setattr(Champion, "publish", interrupted)
        assert end(config, home, plan).outcome == "promoted"
        history = home.champion.history()
        assert [change.kind for change in history.changes] == ["promoted", "measured", "promoted"]


def test_old_nights_lose_their_text_but_not_what_they_know(make_config: MakeConfig) -> None:
    """Red when conversations lie about longer than keep_nights says, or ids go with them: all would be new again."""
    config = make_config(nightly={"keep_nights": 2})
    with Home.open(config.nightly.home).hold() as home:
        for number, forwards in enumerate((8.0, 11.0, 11.0, 11.0, 7.0, 11.0), start=1):
            plan = begin(config, home, number)
            train(config, home, plan, forwards=forwards)
            end(config, home, plan)
        kept = {number for number in home.numbers() if home.night(number).exists("train.jsonl")}
        assert kept == {1, 5, 6}
        assert {number for number in home.numbers() if home.night(number).exists("run")} == kept
        assert sorted(home.night(2).names()) == ["plan.json", "report.md", "seen.npy", "trained.npy", "verdict.json"]
        found = discover(config, home)
        assert found.message == "nothing new: all 360 conversations were there before"


def test_another_machine_ends_a_night_that_was_judged(s3: Any, make_config: MakeConfig, tmp_path: Path) -> None:
    """Red when the end of a night needs a file that only the machine has which trained."""
    config = make_config(nightly={"home": s3.new_url()})
    here, there = (config.model_copy(update={"scratch_dir": str(tmp_path / name)}) for name in ("here", "there"))
    with Home.open(here.nightly.home, here.scratch_dir).hold() as home:
        plan = begin(here, home, 1)
        train(here, home, plan, forwards=8.0)
        RunDir.create(training_config(here, plan, home)).write_receipt("judge", {})
    shutil.rmtree(tmp_path / "here")
    with Home.open(there.nightly.home, there.scratch_dir).hold() as home:
        assert discover(there, home).plan == plan
        assert end(there, home, plan).outcome == "promoted"
        entry = home.champion.history().entry(1)
        assert parent_digest(str(home.champion.local_folder(entry, home.scratch))) == entry.digest


def test_a_judgement_of_something_else_is_refused(make_config: MakeConfig) -> None:
    """Red when a night promotes by figures of another night, or a draft that was replaced after it was judged."""
    config = make_config()
    with Home.open(config.nightly.home).hold() as home:
        plan = begin(config, home, 1)
        train(config, home, plan, forwards=8.0)
        run = RunDir.open(home.run_url(1))
        shutil.rmtree(run.draft)
        write_draft(run.draft, content=99.0)
        with pytest.raises(InputError, match="not the draft that was judged"):
            settle.promote(config, home, plan)
        document = json.loads(run.judgement.read_text())
        write_json(run.judgement, {**document, "night": 7})
        with pytest.raises(InputError, match="of another night"):
            settle.promote(config, home, plan)
        run.judgement.unlink()
        with pytest.raises(InputError, match="missing or damaged"):
            settle.promote(config, home, plan)
        assert not Path(home.place.path, CHAMPION).exists()


def test_two_nights_at_once_are_refused(make_config: MakeConfig) -> None:
    """Red when a second process, or a second flow of this one, works on a home that is held."""
    config = make_config()
    with (
        Home.open(config.nightly.home).hold(),
        pytest.raises(InputError, match=r"nightly\.home=.*another process works on it"),
        Home.open(config.nightly.home).hold(patience=0.0),
    ):
        pass
