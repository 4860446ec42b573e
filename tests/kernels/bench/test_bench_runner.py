"""Rounds over real worker processes, with work that is made up: nothing here is about speed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.bench import results
from kernels.bench.errors import BenchError
from kernels.bench.runner import Bench, Case, Group, Journal, Pool

# Says what it does to a file; takes as long as its variant's name says; misbehaves on request.
WORK = """
import sys, time
import torch

def versions():
    return {"made": "up"}

class Made:
    def __init__(self, settings):
        self.log, self.name = settings["log"], settings["name"]
        self.inputs = [torch.zeros(3)]
        if settings.get("too_large"):
            raise torch.OutOfMemoryError("no room")

    def start(self, variant):
        def body():
            with open(self.log, "a") as file:
                file.write(f"{variant} ")
            print("noise on stdout")
            if variant == "huge":
                raise torch.OutOfMemoryError("no room")
            if variant == "broken":
                raise RuntimeError("wires crossed")
            time.sleep(0.02 if variant.endswith("slow") else 0.0)
            return []
        return body

def open_case(settings, device):
    return Made(settings)

def error_of(variant, problem, device):
    return {"exact": None, "nonsense": float("nan")}.get(variant, 0.25)
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("work")
    (folder / "made_up.py").write_text(WORK)
    groups = {"one": Group(str(folder / "made_up.py"), path=()), "two": Group("made_up", path=(str(folder),))}
    with Pool(groups, "cpu") as pool:
        yield pool


def case(tmp_path: Path, **changes: object) -> Case:
    values: dict[str, object] = {
        "work": "loss", "tokens": 100, "vocab": 8, "supervised": 1.0, "shape": "made up; 1 step",
        "settings": {"log": str(tmp_path / "log"), "name": "x"}, "variants": {"a": "one", "b": "two"}, "problem": {},
    }  # fmt: skip
    return Case(**{**values, **changes})  # type: ignore[arg-type]


def journal(tmp_path: Path) -> Journal:
    return Journal(commit="abc", out=tmp_path / "results.csv", say=lambda line: None)


def test_variants_take_turns_and_are_recorded(pool: Pool, tmp_path: Path) -> None:
    """Red when a variant's rounds run in a block, a warm-up is counted, or rows and iterations are not kept."""
    record = journal(tmp_path)
    Bench(pool, record, rounds=3).measure(case(tmp_path, variants={"a": "one", "b_slow": "two"}, repeat=2))
    warm = "a a a b_slow b_slow b_slow "
    assert (tmp_path / "log").read_text() == warm + "a a b_slow b_slow " * 2
    rows = results.read(tmp_path / "results.csv")
    assert [(row.variant, row.run, row.commit, row.error, row.peak_gib) for row in rows] == [
        ("a", record.run, "abc", 0.25, None),
        ("b_slow", record.run, "abc", 0.25, None),
    ]
    assert rows[1].ms is not None
    assert rows[1].ms >= 20
    assert rows[1].tokens_per_s == pytest.approx(100 / rows[1].ms * 1e3, rel=1e-4)
    assert "made up" in rows[0].versions
    raw = [json.loads(line) for line in results.raw_path(tmp_path / "results.csv").read_text().splitlines()]
    assert [(line["variant"], line["round"]) for line in raw] == [
        (variant, number) for variant in ("a", "b_slow") for number in (0, 0, 1, 1, 2, 2)
    ]


def test_a_turn_that_gives_memory_back_warms_up_each_time(pool: Pool, tmp_path: Path) -> None:
    """Red when a turn after `trim` times the allocator's first growth."""
    Bench(pool, journal(tmp_path), rounds=2).measure(case(tmp_path, variants={"a": "one"}, trim=True))
    assert (tmp_path / "log").read_text() == "a a a a "


def test_the_faster_of_two_is_kept(pool: Pool, tmp_path: Path) -> None:
    """Red when the slower kernel is what others are compared with, or is measured on for nothing."""
    best = {"best": ("best_slow", "best_quick")}
    variants = {"best_slow": "one", "best_quick": "one"}
    bench = Bench(pool, journal(tmp_path), rounds=2)
    (row,) = bench.measure(case(tmp_path, variants=variants, fastest=best))
    assert (row.variant, row.shape) == ("best", "made up; 1 step; quick")
    assert (tmp_path / "log").read_text() == "best_slow best_slow best_quick best_quick best_quick "


def test_running_out_of_memory_is_a_result(pool: Pool, tmp_path: Path) -> None:
    """Red when one variant that does not fit ends the run, or leaves a row with a time."""
    bench = Bench(pool, journal(tmp_path), rounds=2)
    huge, fine = bench.measure(case(tmp_path, variants={"huge": "one", "a": "two"}))
    assert (huge.ms, huge.tokens_per_s, huge.shape) == (None, None, "made up; 1 step; out of memory")
    assert fine.ms is not None
    settings = {"log": str(tmp_path / "log"), "name": "x", "too_large": True}
    (row,) = bench.measure(case(tmp_path, variants={"a": "one"}, settings=settings))
    assert row.ms is None


def test_a_failure_is_told_and_leaves_the_others_alone(pool: Pool, tmp_path: Path) -> None:
    """Red when a broken kernel, or one that computes NaN, gets a row, is not told, or costs the others theirs."""
    bench = Bench(pool, journal(tmp_path), rounds=1)
    bench.finish()
    rows = bench.measure(case(tmp_path, variants={"broken": "one", "nonsense": "one", "exact": "one", "a": "two"}))
    assert [(row.variant, row.error) for row in rows] == [("exact", None), ("a", 0.25)]
    with pytest.raises(BenchError, match=r"2 measurements failed(.|\n)*nonsense is nan(.|\n)*wires crossed"):
        bench.finish()


def test_a_peer_that_cannot_be_imported_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    """Red when the run starts without the peer, or the user sees a traceback of another process."""
    (tmp_path / "peer.py").write_text("import a_peer_that_is_not_there\n")
    groups = {"ours": Group("json"), "peer": Group(str(tmp_path / "peer.py"))}
    with pytest.raises(
        BenchError, match=r"peer cannot be measured: .*a_peer_that_is_not_there.*--peer-path"
    ) as failure:
        Pool(groups, "cpu").__enter__()
    assert "\n" not in str(failure.value)


def test_a_worker_that_dies_says_so(tmp_path: Path) -> None:
    """Red when the parent waits for ever for a process that is gone, or hides what it last said."""
    (tmp_path / "dies.py").write_text(
        "import os, sys\ndef open_case(settings, device):\n    sys.stderr.write('last words')\n"
        "    sys.stderr.flush()\n    os._exit(9)\n"
    )
    with Pool({"one": Group(str(tmp_path / "dies.py"))}, "cpu") as pool:
        bench = Bench(pool, journal(tmp_path), rounds=1)
        with pytest.raises(BenchError, match=r"code 9(.|\n)*last words"):
            bench.measure(case(tmp_path, variants={"a": "one"}, problem=None))
