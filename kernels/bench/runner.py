"""Rounds: every variant of a case, A B C A B C, each in the process that owns it; medians into rows.

Interleaving is what makes ratios fair: clocks and temperature drift over minutes, and each variant sees all of them. A
turn that shares the card with another process's tensors gives its cached memory back (`trim`) and warms up anew.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from kernels.bench import checkout, results
from kernels.bench.errors import BenchError
from kernels.bench.results import GIB, Row

_WORKER = Path(__file__).parent / "worker.py"
_STDERR_TAIL = 3000


@dataclass(frozen=True, slots=True)
class Group:
    """A worker process. load: a module, or the .py file of a peer; path: what its sys.path begins with."""

    load: str
    path: tuple[str, ...] = (str(checkout.ROOT),)
    python: str = sys.executable


@dataclass(frozen=True, slots=True)
class Case:
    """One problem and its variants.

    variants: name -> group. settings: what `open_case` gets. problem: what `error_of` gets, None for no error. rounds:
    fewer than asked for where one turn is long. repeat: timed iterations a turn. trim: every turn gives its memory
    back, and warms up anew. warm: an untimed iteration first. fastest: recorded name -> the variants of which only the
    fastest of the first round is kept.
    """

    work: str
    tokens: int
    vocab: int | None
    supervised: float
    shape: str
    settings: Mapping[str, Any]
    variants: Mapping[str, str]
    problem: Mapping[str, Any] | None = None
    rounds: int = 99
    repeat: int = 1
    trim: bool = False
    warm: bool = True
    fastest: Mapping[str, Sequence[str]] = field(default_factory=dict)


class WorkFailed(BenchError):
    """What a worker was asked to measure raised an exception; the worker goes on."""


class Process:
    """A worker, spoken to in JSON lines."""

    def __init__(self, name: str, group: Group, device: str) -> None:
        self.name = name
        self._is_peer = group.load.endswith(".py")
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed in close()
        paths = [argument for entry in group.path for argument in ("--path", entry)]
        self._process = subprocess.Popen(
            [group.python, str(_WORKER), "--load", group.load, *paths, "--device", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment_of(group),
        )
        self.about: dict[str, Any] = {}

    def wait_until_ready(self) -> None:
        """Raises BenchError when what it should load cannot be imported."""
        self.about = self._reply()
        if "failed" in self.about:
            last = self.about["failed"].strip().splitlines()[-1]
            way_out = "name its --peer-path or --peer-python, or leave it out" if self._is_peer else "see --device"
            raise BenchError(f"{self.name} cannot be measured: {last}; {way_out}")

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """A reply. Raises BenchError with the traceback when the worker failed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise BenchError(f"the {self.name} worker has ended:\n{self._tail()}") from None
        reply = self._reply()
        if "failed" in reply:
            raise WorkFailed(f"{self.name} failed at {do} {json.dumps(request)}:\n{reply['failed']}")
        return reply

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"the {self.name} worker ended with code {self._process.wait()}:\n{self._tail()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-_STDERR_TAIL:]

    def close(self) -> None:
        """End the process: its stdin is closed, which it takes for "quit"."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


def environment_of(group: Group) -> dict[str, str]:
    """A peer with an interpreter of its own keeps its own packages: what is on our PYTHONPATH stays out."""
    own = group.python != sys.executable
    return {name: value for name, value in os.environ.items() if not (own and name == "PYTHONPATH")}


class Pool:
    """The workers of a run, all started before anything is measured."""

    def __init__(self, groups: Mapping[str, Group], device: str) -> None:
        self._processes = {name: Process(name, group, device) for name, group in groups.items()}

    def __enter__(self) -> Pool:
        try:
            for process in self._processes.values():
                process.wait_until_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.close()

    def __getitem__(self, name: str) -> Process:
        return self._processes[name]


def _print(line: str) -> None:
    print(line, flush=True)  # minutes lie between lines


@dataclass(slots=True)
class Journal:
    """Where the rows of one command go: printed as they come, and recorded unless it is a try."""

    commit: str
    out: Path | None
    say: Callable[[str], None] = _print
    run: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}")
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def open(cls, out: Path, *, record: bool) -> Journal:
        """Raises BenchError for an uncommitted tree, unless nothing is recorded."""
        if not record:
            return cls(commit="not recorded", out=None)
        written = [path for file in (results.RESULTS, out) for path in (file, results.raw_path(file))]
        return cls(commit=checkout.clean_commit(written=written), out=out)

    def add(self, rows: Sequence[Row], iterations: Iterable[Mapping[str, Any]]) -> None:
        """Record rows and the iterations behind them."""
        self.rows += rows
        for row in rows:
            self.say(describe(row))
        if self.out is not None:
            results.append(self.out, rows)
            results.append_raw(results.raw_path(self.out), iterations)


def describe(row: Row) -> str:
    """A row as one line for the terminal."""
    # A row with a peak and no time is a prediction (`eyas bench plan`).
    out = " out of memory" if row.peak_gib is None else " " * 13
    cells = [out if row.ms is None else f"{row.ms:10.3f} ms"]
    for name, value in (("peak", row.peak_gib), ("extra", row.extra_gib)):
        if value is not None:
            cells.append(f"{name} {value:8.3f} GiB")
    if row.error is not None:
        cells.append(f"error {row.error:.1e}")
    vocab = f" x {row.vocab}" if row.vocab else ""
    return (
        f"{row.work:9} {row.variant:18} {row.tokens:>7}{vocab} {row.supervised:4.0%}  {'  '.join(cells)}  [{row.shape}]"
    )


class Bench:
    """Measures cases with a pool into a journal.

    A variant that fails gets no row and does not keep the others from theirs: `finish` raises what was met.
    """

    def __init__(self, pool: Pool, journal: Journal, rounds: int) -> None:
        self._pool, self._journal, self._rounds = pool, journal, rounds
        self._errors: dict[tuple[str, str], float | None] = {}
        self._failures: list[str] = []

    def measure(self, case: Case) -> list[Row]:
        """Take a case and record it."""
        rows, raw = self.take(case)
        self.record(rows, raw)
        return rows

    def record(self, rows: Sequence[Row], iterations: Iterable[Mapping[str, Any]]) -> None:
        """Add rows to the journal."""
        self._journal.add(rows, iterations)

    def finish(self) -> None:
        """Raises BenchError with every failure."""
        if self._failures:
            raise BenchError(f"{len(self._failures)} measurements failed\n" + "\n".join(self._failures))

    def say(self, text: str) -> None:
        """A line for the terminal."""
        self._journal.say(text)

    def take(self, case: Case) -> tuple[list[Row], list[dict[str, Any]]]:
        """Prepare, take the rounds, release: rows and the iterations behind them, not recorded.

        Running out of memory is a result, not a failure: that row has no time.
        """
        failed: set[str] = set()
        errors: dict[str, float | None] = {}
        for variant, group in case.variants.items():
            with self._noting(failed, variant):
                errors[variant] = self._error(case, variant, group)
        groups = dict.fromkeys(case.variants.values())
        lost: set[str] = set()
        for group in groups:
            of_group = [variant for variant, own in case.variants.items() if own == group]
            with self._noting(failed, *of_group):
                if "oom" in self._pool[group].ask("prepare", settings=dict(case.settings)):
                    lost.add(group)
        running = {
            variant: group for variant, group in case.variants.items() if group not in lost and variant not in failed
        }
        taken: dict[str, list[dict[str, Any]]] = {variant: [] for variant in case.variants}
        slower: set[str] = set()
        for number in range(min(self._rounds, case.rounds)):
            for variant, group in list(running.items()):
                warm = 1 if case.warm and (number == 0 or case.trim) else 0
                reply: dict[str, Any] = {"oom": True}
                with self._noting(failed, variant):
                    reply = self._pool[group].ask("run", variant=variant, warm=warm, repeat=case.repeat, trim=case.trim)
                if "oom" in reply:
                    del running[variant]
                    taken[variant] = []
                    continue
                taken[variant] += [{"round": number, **iteration} for iteration in reply["iterations"]]
            if number == 0:
                for variants in case.fastest.values():
                    slower.update(_all_but_fastest(variants, taken))
                running = {variant: group for variant, group in running.items() if variant not in slower}
        for group in groups:
            self._pool[group].ask("release")
        names = {variant: name for name, variants in case.fastest.items() for variant in variants}
        rows = [
            self._row(case, names.get(variant, variant), variant, group, taken[variant], errors[variant])
            for variant, group in case.variants.items()
            if variant not in slower and variant not in failed
        ]
        about = {"run": self._journal.run, "work": case.work, "tokens": case.tokens, "vocab": case.vocab,
                 "supervised": case.supervised, "shape": case.shape}  # fmt: skip
        raw = [{**about, "variant": variant, **one} for variant, iterations in taken.items() for one in iterations]
        return rows, raw

    @contextlib.contextmanager
    def _noting(self, failed: set[str], *variants: str) -> Iterator[None]:
        """Keep a failure for `finish`, and leave these variants out from there on."""
        try:
            yield
        except WorkFailed as failure:
            self._failures.append(str(failure))
            failed.update(variants)
            self.say(f"{', '.join(variants)} failed: {str(failure).strip().splitlines()[-1]}")

    def _error(self, case: Case, variant: str, group: str) -> float | None:
        """The error of a variant; the same problem is solved once a run."""
        if case.problem is None:
            return None
        key = (variant, json.dumps(case.problem, sort_keys=True))
        if key not in self._errors:
            reply = self._pool[group].ask("error", variant=variant, problem=dict(case.problem))
            if "oom" in reply:
                raise WorkFailed(f"the error problem of {variant} does not fit in memory: {case.problem}")
            if reply["error"] is not None and not math.isfinite(reply["error"]):
                raise WorkFailed(f"the error of {variant} is {reply['error']}: a time for it would mean nothing")
            self._errors[key] = reply["error"]
        return self._errors[key]

    def _row(
        self, case: Case, name: str, variant: str, group: str, taken: list[dict[str, Any]], error: float | None
    ) -> Row:
        about = self._pool[group].about
        ms = statistics.median(one["ms"] for one in taken) if taken else None
        shape = case.shape if name == variant else f"{case.shape}; {variant.removeprefix(name).strip('_')}"
        return Row(
            run=self._journal.run,
            work=case.work,
            variant=name,
            tokens=case.tokens,
            vocab=case.vocab,
            supervised=case.supervised,
            shape=shape if taken else f"{shape}; out of memory",
            ms=ms,
            peak_gib=_gib(taken, "peak_bytes"),
            extra_gib=_gib(taken, "extra_bytes"),
            error=error,
            tokens_per_s=case.tokens / ms * 1e3 if ms else None,
            gpus=1,
            gpu=about["gpu"],
            versions=", ".join(f"{name} {version}" for name, version in about["versions"].items()),
            commit=self._journal.commit,
        )


def _all_but_fastest(variants: Sequence[str], taken: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The variants to drop: all but the one with the lowest median, which one that ran out of memory never is."""
    medians = {v: statistics.median(one["ms"] for one in taken[v]) for v in variants if taken.get(v)}
    fastest = min(medians, key=medians.__getitem__) if medians else variants[0]
    return [variant for variant in variants if variant != fastest]


def _gib(taken: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [one[name] for one in taken]
    return None if not values or None in values else max(values) / GIB
