"""What `eyas bench ranks` measures: training throughput of 1 to n ranks of one machine, in one start of torchrun.

    online     each rank has a target replica and trains on what it gives
    offline    each rank reads the store of its packs
    context    ranks share packs (tasks/trainer/bench/context.py)

The work of a rank is the same at every number of ranks: so many packs of chat-like documents a step, dealt by cost as
in training; the step is the trainer's own, counting of rows, talk between ranks, clipping and AdamW included. While
fewer ranks are measured the others wait, and the numbers take turns, so that all share one compilation, one clock and
one temperature. Target and draft have the shape of Qwen3-8B and random weights (a smaller one by --target); the store
holds the states of that target, on a local disk, and is read from the page cache.

tokens and ms are means of the timed steps, over all ranks; tokens_per_s is of all ranks together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels.bench.errors import BenchError
from kernels.bench.results import GIB, Row
from kernels.bench.runner import Journal
from tasks.trainer.bench.ranks_telling import Listening, Telling
from tasks.trainer.bench.step import DRAFT, TINY, TTT_STEPS, shape_of
from tasks.trainer.ranks import see_own_gpu
from tasks.trainer.stop import stop

_LISTEN_SECONDS = 0.2
VARIANTS = ("online", "offline", "context")
# Layers, and what else of the target's shape is not its draft's; head counts are the draft's.
_DEEP = {
    "qwen3-1.7b": {"num_layers": 28, "hidden_size": 2048, "num_heads": 16, "intermediate_size": 6144},
    "qwen3-4b": {"num_layers": 36, "hidden_size": 2560, "num_heads": 32, "intermediate_size": 9728},
    "qwen3-8b": {"num_layers": 36},
}
TARGETS = tuple(_DEEP)


def settings_of(
    *,
    target: str,
    pack_tokens: int,
    packs: int,
    steps: int,
    rounds: int,
    device: str,
    tiny: bool,
    context_tokens: int = 32768,
    context_checkpointing: str = "none",
) -> dict[str, Any]:
    """What the ranks are told. Raises BenchError for an unknown target."""
    if target not in _DEEP:
        raise BenchError(f"--target {target} is unknown: use {', '.join(TARGETS)}")
    shape: dict[str, Any] = {**TINY, "num_layers": 8} if tiny else {**DRAFT, **_DEEP[target]}
    return {
        **shape,
        "ttt_steps": 2 if tiny else TTT_STEPS,
        "dtype": "float32" if device == "cpu" else "bfloat16",
        "device": device,
        "pack_tokens": 128 if tiny else pack_tokens,
        "median_tokens": 32 if tiny else 1024,
        "packs": packs,
        "steps": steps,
        "rounds": rounds,
        "context_tokens": 128 if tiny else context_tokens,
        "context_checkpointing": context_checkpointing,
    }


def counts_of(nproc: int) -> list[int]:
    """Numbers of ranks that are measured: powers of two, and all of them."""
    return sorted({*(2**power for power in range(nproc.bit_length()) if 2**power <= nproc), nproc})


def ranks_of(count: int) -> str:
    """ "2 ranks"."""
    return f"{count} rank{'s' if count > 1 else ''}"


def measure(journal: Journal, settings: Mapping[str, Any], *, variants: Sequence[str], nproc: int) -> list[Row]:
    """Start nproc ranks, take every variant at `counts_of(nproc)` of them, record each row once it is known.

    Raises BenchError when a rank fails, InterruptedError on SIGTERM; what was found before stays recorded.
    """
    if "context" in variants and nproc == 1:
        raise BenchError("--variants context takes several ranks: use --nproc 2 or more, or leave it out")
    rows: list[Row] = []

    def record(line: Mapping[str, Any]) -> None:
        row = _row(journal, settings, line)
        rows.append(row)
        journal.add([row], [{"run": journal.run, "work": "ranks", **line}])

    with tempfile.TemporaryDirectory(prefix="eyas-ranks-") as folder:
        told, found = Path(folder, "settings.json"), Path(folder, "found.jsonl")
        asked = {**settings, "variants": list(variants), "folder": folder, "started": time.monotonic()}
        told.write_text(json.dumps(asked), encoding="utf-8")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc),
            "-m", "tasks.trainer.bench.ranks", str(told), str(found),
        ]  # fmt: skip
        code = _follow(command, Listening(found), record)
    if code:
        raise BenchError(f"the ranks ended with exit code {code}; see what they printed above")
    return rows


def _follow(command: Sequence[str], listening: Listening, record: Callable[[Mapping[str, Any]], None]) -> int:
    """Run the launcher; record what its ranks find as they find it. Returns its exit code."""
    environment = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": "1",  # the host's part is small operations, which wait for threads (train/stage.py)
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
    }
    process = subprocess.Popen(command, env=environment)
    try:
        with stop.installed(lambda seconds: InterruptedError("stopped by SIGTERM; the rows above are recorded")):
            while (code := process.poll()) is None:
                for line in listening.lines():
                    record(line)
                time.sleep(_LISTEN_SECONDS)
    finally:
        if process.poll() is None:  # we are told to stop: torchrun ends its ranks
            process.terminate()
            process.wait()
    for line in listening.lines():
        record(line)
    return code


def _row(journal: Journal, settings: Mapping[str, Any], line: Mapping[str, Any]) -> Row:
    return Row(
        run=journal.run,
        work="ranks",
        variant=line["variant"],
        tokens=round(line["tokens"]),
        vocab=settings["vocab_size"],
        supervised=1.0,
        shape=f"{shape_of(line['layout'], settings)}; {line['about']}",
        ms=line["ms"],
        peak_gib=None if line["peak_bytes"] is None else line["peak_bytes"] / GIB,
        extra_gib=None,
        error=None,
        tokens_per_s=line["tokens"] / line["ms"] * 1e3,
        gpus=line["gpus"],
        gpu=line["gpu"],
        versions=line["versions"],
        commit=journal.commit,
    )


def describe(rows: Sequence[Row]) -> list[str]:
    """A line a row: tokens/s, and how much more than one rank's, or than the ideal of a shared context."""
    lines = []
    for row in rows:
        one = [other for other in rows if (other.variant, other.gpus) == (row.variant, 1)]
        assert row.tokens_per_s is not None
        more = f"  x {row.tokens_per_s / one[0].tokens_per_s:.3f}" if one and one[0].tokens_per_s else ""
        if row.variant == "context":  # of other lengths: tokens/s do not compare
            notes = [note for note in row.shape.split("; ") if "ideal" in note]
            more = f"  {row.ms or 0.0:,.0f} ms for {row.tokens:,} tokens{''.join(f', {note}' for note in notes)}"
        lines.append(f"{row.variant:8} {ranks_of(row.gpus):7}  {row.tokens_per_s:12,.0f} tokens/s{more}")
    return lines


def main() -> None:
    """A rank's entry, for torchrun: `-m tasks.trainer.bench.ranks SETTINGS FOUND`."""
    told, found = (Path(argument) for argument in sys.argv[1:])
    settings = json.loads(told.read_text(encoding="utf-8"))
    telling = Telling(found, int(os.environ["RANK"]) == 0, settings["started"])
    telling.say("torchrun has started the ranks")
    if settings["device"] == "cuda":
        see_own_gpu()  # before anything asks CUDA what there is
    from tasks.trainer.bench.ranks_case import take_part

    take_part(settings, telling)


if __name__ == "__main__":
    main()
