"""What `eyas bench plan` measures: the allocator's peak of real optimizer steps against what the plan predicts.

The shapes are unlike one another and unlike those of the other benchmarks, from which the account's few shares were
read. Each case is one optimizer step of the trainer's own code on random states, from the second one on; "online" runs
a target with random weights beside the draft, through the trainer's own source, two packs one after the other.

Every case gives two rows in the results: variant "measured" (peak_gib of the allocator, ms) and "predicted".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kernels.bench import layouts
from kernels.bench.errors import BenchError
from kernels.bench.results import GIB, Row
from kernels.bench.runner import Bench, Case, Group

GROUPS = {"ours": Group("tasks.trainer.bench.plan_case")}
TTT_STEPS = 7

# Sizes of drafts: hidden size, query and key heads, head dim, MLP width.
_D1024 = {"hidden_size": 1024, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "intermediate_size": 3072}
_D2048 = {"hidden_size": 2048, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "intermediate_size": 6144}
_D2560 = {"hidden_size": 2560, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "intermediate_size": 9728}
_D5120 = {"hidden_size": 5120, "num_heads": 40, "num_kv_heads": 8, "head_dim": 128, "intermediate_size": 17408}
# The target beside the 2,048 wide draft.
_TARGET = {"num_hidden_layers": 28}
# What differs from case to case. supervised: share of each document's tokens, its last ones.
_CASES: Sequence[Mapping[str, Any]] = (
    {**_D1024, "vocab_size": 16000, "tokens": 49152, "supervised": 1.0},
    {**_D2048, "vocab_size": 32000, "tokens": 8192, "supervised": 0.5, "packed": True},
    {**_D2048, "vocab_size": 32000, "tokens": 12288, "supervised": 1.0, "packed": True, "target": _TARGET},
    {**_D2560, "vocab_size": 64000, "tokens": 16384, "supervised": 1.0, "checkpointing": "mlp"},
    {**_D2560, "vocab_size": 64000, "tokens": 4096, "supervised": 1.0, "packed": True},
    {**_D5120, "vocab_size": 32000, "tokens": 20480, "supervised": 0.25},
    {**_D5120, "vocab_size": 32000, "tokens": 40960, "supervised": 1.0, "checkpointing": "step",
     "mlp_chunk_rows": 16384},
)  # fmt: skip
_TINY = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48}
_TINY_CASES: Sequence[Mapping[str, Any]] = (
    {**_TINY, "vocab_size": 40, "tokens": 96, "supervised": 0.5, "packed": True},
    {**_TINY, "vocab_size": 40, "tokens": 64, "supervised": 1.0, "checkpointing": "step", "target":
     {"num_hidden_layers": 4}},
)  # fmt: skip


def cases(*, device: str = "cuda", tiny: bool = False) -> list[Case]:
    """Every case. tiny: shapes for a test on the CPU."""
    return [_case(chosen, device=device, tiny=tiny) for chosen in (_TINY_CASES if tiny else _CASES)]


def _case(chosen: Mapping[str, Any], *, device: str, tiny: bool) -> Case:
    tokens, supervised = chosen["tokens"], chosen["supervised"]
    packed = chosen.get("packed", False)
    shortest, longest = (16, 32) if tiny else (512, 3072)
    lengths = layouts.document_lengths(tokens, shortest=shortest, longest=longest) if packed else [tokens]
    settings = {
        "checkpointing": "none",
        "mlp_chunk_rows": None,
        "target": None,
        **chosen,
        "document_lengths": lengths,
        "target_vocab_size": 64 if tiny else 151936,
        "ttt_steps": 3 if tiny else TTT_STEPS,
        "dtype": "float32" if device == "cpu" else "bfloat16",
    }
    return Case(
        work="plan",
        tokens=tokens,
        vocab=chosen["vocab_size"],
        supervised=supervised,
        shape=shape_of(settings),
        settings=settings,
        variants={"measured": "ours"},
        rounds=1,
        trim=True,
    )


def shape_of(settings: Mapping[str, Any]) -> str:
    """The shape cell of a case's rows."""
    online = settings["target"] is not None
    documents = len(settings["document_lengths"])
    chunk = f", MLP chunks of {settings['mlp_chunk_rows']}" if settings["mlp_chunk_rows"] else ""
    return (
        f"{'online' if online else 'states given'}, {documents} document{'s' if documents > 1 else ''}; "
        f"{settings['ttt_steps']} steps; checkpointing {settings['checkpointing']}{chunk}; "
        f"D {settings['hidden_size']}; {settings['num_heads']}/{settings['num_kv_heads']} heads x "
        f"{settings['head_dim']}; MLP {settings['intermediate_size']}; V {settings['target_vocab_size']}; "
        f"{settings['dtype']}"
    )


def measure(bench: Bench, found: Sequence[Case]) -> list[tuple[Row, Row]]:
    """Take the cases; record and return (measured, predicted) of each. Raises BenchError for those that failed."""
    from tasks.trainer.bench.plan_case import predict

    pairs = []
    for case in found:
        rows, raw = bench.take(case)
        for measured in rows:
            peak = predict(case.settings)
            predicted = replace(
                measured, variant="predicted", ms=None, tokens_per_s=None, extra_gib=None, peak_gib=peak / GIB
            )
            bench.record([measured, predicted], raw)
            pairs.append((measured, predicted))
            bench.say(describe(measured, predicted))
    bench.finish()
    return pairs


def describe(measured: Row, predicted: Row) -> str:
    """One line: what was predicted, and how far off it was."""
    assert predicted.peak_gib is not None
    if measured.peak_gib is None:
        return f"  predicted {predicted.peak_gib:.2f} GiB; nothing to hold it against here"
    return f"  predicted {predicted.peak_gib:.2f} GiB, off by {predicted.peak_gib / measured.peak_gib - 1:+.1%}"


def worst_error(pairs: Sequence[tuple[Row, Row]]) -> float:
    """The largest relative error of the peaks. Raises BenchError when none was measured."""
    errors = [
        abs(predicted.peak_gib / measured.peak_gib - 1)
        for measured, predicted in pairs
        if measured.peak_gib and predicted.peak_gib
    ]
    if not errors:
        raise BenchError("no peak was measured: memory is the allocator's on CUDA")
    return max(errors)
