"""Trackers: each line of metrics.jsonl once, whatever was killed, added late or damaged; nothing over the network."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import accelerate.tracking
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tasks.trainer.config import Train
from tasks.trainer.errors import InputError
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import run_stage
from tasks.trainer.train.curves import read_lines
from tasks.trainer.train.tracking import Tracking, scalars

Values = Callable[..., dict[str, Any]]


def step_line(step: int, loss: float | None = None) -> dict[str, Any]:
    return {
        "step": step, "loss": 9.0 / step if loss is None else loss, "acc": [0.5, 0.25], "alpha": [0.4, 0.2],
        "tau": None if step == 1 else 1.5, "rows": [4, 3], "grad_norm": 0.7, "learning_rate": 1e-3, "tokens": 128,
        "seconds": 0.5, "data_wait_s": 0.0, "h2d_bytes": 10, "epoch": 0,
    }  # fmt: skip


def heldout_line(step: int) -> dict[str, Any]:
    return {"step": step, "heldout": {"loss": 2.0, "acc": [0.1, 0.0], "alpha": [0.3, 0.1], "tau": 1.2}}


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a folder: steps and values by name."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


class Following:
    """A metrics.jsonl with trackers on it, as the loop writes both."""

    def __init__(self, root: Path, *trackers: str) -> None:
        self.root = root
        self.metrics = root / "metrics.jsonl"
        self.folder = root / "trackers"
        self.settings = Train(trackers=trackers or ("tensorboard",))

    def run(self, lines: list[dict[str, Any]], *, after: int = 0) -> None:
        """Continue after a step: what was written past it is dropped, as MetricsFile does."""
        kept = [line for line in read_lines(self.metrics) if line["step"] <= after]
        with self.metrics.open("w") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
            file.flush()
            with Tracking(self.settings, self.folder, run_name="run", metrics=self.metrics, step=after) as tracking:
                for line in lines:
                    file.write(json.dumps(line) + "\n")
                    tracking.log(line)


@pytest.fixture(autouse=True)
def a_second_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads event files in the order of the seconds in their names: no two starts may share one."""
    seconds = iter(range(1_700_000_000, 1_700_010_000))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: next(seconds) + now() % 1)


def test_every_figure_is_shown_by_name() -> None:
    """Red when a figure that one watches is missing, or one without a value is shown."""
    names = {"loss", "acc_0", "acc_1", "alpha_0", "alpha_1", "tau", "grad_norm", "learning_rate", "tokens_per_s",
             "data_wait_s", "seconds", "epoch"}  # fmt: skip
    found = scalars(step_line(2))
    assert found.keys() == {f"train/{name}" for name in names}
    assert found["train/tokens_per_s"] == 256.0
    assert scalars(step_line(1)).keys() == found.keys() - {"train/tau"}
    assert scalars(heldout_line(5)) == {
        "heldout/loss": 2.0, "heldout/acc_0": 0.1, "heldout/acc_1": 0.0, "heldout/alpha_0": 0.3, "heldout/alpha_1": 0.1,
        "heldout/tau": 1.2,
    }  # fmt: skip


def test_a_continued_run_shows_each_step_once(tmp_path: Path) -> None:
    """Red when steps past the checkpoint show twice, or those before it are lost."""
    following = Following(tmp_path)
    following.run(
        [step_line(1), step_line(2), heldout_line(2), step_line(3, 70.0), step_line(4, 70.0), heldout_line(4)]
    )
    following.run([step_line(3), step_line(4), heldout_line(4), step_line(5)], after=2)
    curves = shown(following.folder)
    assert [step for step, _ in curves["train/loss"]] == [1, 2, 3, 4, 5]
    assert [value for _, value in curves["train/loss"]] == pytest.approx([9.0, 4.5, 3.0, 2.25, 1.8])
    assert [step for step, _ in curves["heldout/tau"]] == [2, 4]


def test_a_tracker_that_joins_late_or_was_lost_has_the_whole_curve(tmp_path: Path) -> None:
    """Red when a tracker misses the steps before it, a lost folder starts at the checkpoint, or a damaged mark shows
    steps twice."""
    following = Following(tmp_path, "dvclive")
    following.settings = Train(trackers=())
    following.run([step_line(1), step_line(2), heldout_line(2)])
    assert not following.folder.exists()
    following.settings = Train()
    following.run([step_line(3)], after=2)
    for harm in (
        lambda: shutil.rmtree(following.folder),
        lambda: (following.folder / "state.json").write_text('{"tensorb'),
        lambda: (following.folder / "state.json").unlink(),
    ):
        harm()
        following.run([], after=3)
        curves = shown(following.folder)
        assert [step for step, _ in curves["train/loss"]] == [1, 2, 3]
        assert [step for step, _ in curves["heldout/loss"]] == [2]


class Recording(accelerate.tracking.GeneralTracker):
    """A tracker that cannot take anything back."""

    name = "wandb"
    requires_logging_directory = False
    starts: list[dict[str, Any]] = []  # noqa: RUF012
    logged: list[tuple[int, float]] = []  # noqa: RUF012

    def __init__(self, project: str, **options: Any) -> None:
        super().__init__(_blank=True)
        self.starts.append({"project": project, **options})

    @property
    def tracker(self) -> None:
        return None

    def start(self) -> None:
        accelerate.tracking.logger.debug("as accelerate's own trackers do")

    def log(self, values: dict[str, float], step: int | None = None, **options: Any) -> None:
        assert step is not None
        self.logged.append((step, next(iter(values.values()))))


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> type[Recording]:
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "wandb", Recording)
    monkeypatch.setattr("tasks.trainer.train.tracking.check_trackers", lambda settings: None)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    Recording.starts, Recording.logged = [], []
    accelerate.PartialState._reset_state()  # as in a process of its own
    return Recording


def test_what_cannot_be_taken_back_is_not_given_twice(tmp_path: Path, recording: type[Recording]) -> None:
    """Red when wandb gets a step twice, starts a second run when one continues, or goes online by itself."""
    following = Following(tmp_path, "wandb")
    following.run([step_line(step) for step in (1, 2, 3, 4)])
    following.run([step_line(step) for step in (3, 4, 5)], after=2)
    assert [step for step, _ in recording.logged] == [1, 2, 3, 4, 5]
    first, second = recording.starts
    assert first == second
    assert (first["mode"], first["resume"], first["dir"]) == ("offline", "allow", str(following.folder))
    assert first["project"] == "eyas"
    assert first["id"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Red when a tracker that is not installed is passed over, or ends in an ImportError."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "comet_ml" else find(name))
    with pytest.raises(
        InputError, match=r"'comet_ml' is not installed .*pip install comet-ml\), or leave comet_ml out"
    ):
        Following(tmp_path, "comet_ml").run([])


def test_a_missing_package_is_said_before_anything_is_prepared(
    recipe_values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a run finds out after hours of preparing and capturing."""
    run = RunDir.create(load_config(recipe_values(train={"trackers": ["swanlab"]})))
    monkeypatch.setattr("tasks.trainer.data.prepare.load_text", lambda *a, **k: pytest.fail("prepare went ahead"))
    with pytest.raises(InputError, match="swanlab"):
        run_stage("prepare", run, silent)


def test_a_run_is_shown_as_its_metrics_tell(recipe_values: Values) -> None:
    """Red when the loop gives trackers other lines than metrics.jsonl, or a continued run shows a step twice."""
    train = {"trackers": ["tensorboard"], "steps": 8, "checkpoint_every": 3, "evaluate_every": 4}
    run = RunDir.create(load_config(recipe_values(train=train)))
    for stage in ("prepare", "train"):
        run_stage(stage, run, silent)
    shutil.rmtree(max(run.checkpoints.glob("step-*")))
    run_stage("train", run, silent)
    curves = shown(run.trackers)
    expected: dict[str, list[tuple[int, float]]] = {}
    for line in read_lines(run.metrics):
        for name, value in scalars(line).items():
            expected.setdefault(name, []).append((line["step"], pytest.approx(value, rel=1e-6)))  # type: ignore[arg-type]
    clocks = {"train/seconds", "train/tokens_per_s", "train/data_wait_s"}
    assert len(expected["train/loss"]) == 8
    assert len(expected["heldout/tau"]) == 2
    assert curves.keys() == expected.keys()
    for name in curves.keys() - clocks:
        assert curves[name] == expected[name], name
