"""What `eyas bench loss` measures: the loss of all TTT steps and its gradients, in two parts.

logits   7 float32 logits tensors [T, Vd] that share one target, as in SpecForge's published table; the gradient is that
         of the logits.
    triton      kernels.soft_target_loss, gradient written over the logits, metrics included
    compile     torch.compile of the plain formula, target probabilities given
    specforge   its LogSoftmaxLoss on leaf logits, as its own benchmark calls it
    copy        the 7 logits tensors copied onto each other: what the memory can do
linear   from hidden states [T, D] of 7 steps, the draft's head, the target's last hidden states and head rows, in
         bfloat16; gradients of the hidden states and of the head.
    linear      kernels.linear_soft_target_loss, metrics included, head gradient in float32
    compile     logits by a matrix product a step, then torch.compile of the plain formula
    specforge   the same with its LogSoftmaxLoss: target logits once, softmax in float32, padded and sliced a step.
                Above 131,072 columns, which LogSoftmaxLoss refuses, its own compiled formula. Its trainer's metrics
                (another softmax over the logits, an argmax) are left out, to its advantage.
    matmul      the matrix products alone: 1 + 3 a step

torch.compile sees the number of rows as dynamic and the vocabulary as static, which is how a trainer would use it. The
error is of all gradients on fewer rows, against float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kernels.bench import layouts
from kernels.bench.runner import Bench, Case, Group

STEPS = 7
HIDDEN = 4096
LOGITS = ((1024, 32000), (1024, 64000), (4096, 32000), (4096, 64000), (8192, 32000), (8192, 64000), (16384, 32000))
LINEAR = (*((tokens, vocab) for tokens in (1024, 2048, 4096, 8192, 16384) for vocab in (32000, 64000)), (4096, 151936))
PROBLEM_ROWS = 256
_LONG = 2**28  # logits of a step from which three rounds are enough


def groups(peer: Group | None) -> dict[str, Group]:
    """The processes: ours, and the peer's when there is one."""
    ours = {"ours": Group("kernels.bench.loss_case")}
    return ours if peer is None else {**ours, "specforge": peer}


def specforge_file() -> str:
    """What the peer's process loads."""
    return str(Path(__file__).parent / "specforge_loss.py")


def cases(*, against: bool, parts: Sequence[str] = ("logits", "linear"), tiny: bool = False) -> list[Case]:
    """Every case; against: with the peer. tiny: shapes for a test."""
    peer = {"specforge": "specforge"} if against else {}
    steps, hidden = (2, 16) if tiny else (STEPS, HIDDEN)
    found = []
    if "logits" in parts:
        for tokens, vocab in ((12, 40),) if tiny else LOGITS:
            settings = {"part": "logits", "steps": steps, "vocab": vocab}
            found.append(
                Case(
                    work="loss",
                    tokens=tokens,
                    vocab=vocab,
                    supervised=1.0,
                    shape=f"logits; {steps} steps; float32",
                    settings={**settings, "tokens": tokens},
                    problem={**settings, "tokens": 12 if tiny else PROBLEM_ROWS},
                    variants={"triton": "ours", **({} if tiny else {"compile": "ours"}), **peer, "copy": "ours"},
                    repeat=3,
                    trim=tokens * vocab >= _LONG,
                )
            )
    if "linear" in parts:
        for tokens, vocab in ((16, 40),) if tiny else LINEAR:
            settings = {"part": "linear", "steps": steps, "vocab": vocab, "hidden": hidden,
                        "dtype": "float32" if tiny else "bfloat16"}  # fmt: skip
            shape = f"linear; {steps} steps; D {hidden}; {settings['dtype']}"
            variants = {"linear": "ours", **({} if tiny else {"compile": "ours"}), **peer, "matmul": "ours"}
            for supervised, layout in ((1.0, layouts.ALL), (0.25, layouts.TURNS)):
                found.append(
                    Case(
                        work="loss",
                        tokens=tokens,
                        vocab=vocab,
                        supervised=supervised,
                        shape=shape,
                        settings={**settings, "tokens": tokens, "layout": layout},
                        problem={**settings, "tokens": 64 if tiny else PROBLEM_ROWS, "layout": layout},
                        variants=variants if supervised == 1.0 else {"linear": "ours"},
                        rounds=3 if tokens * vocab >= _LONG else 99,
                        trim=tokens * vocab >= _LONG,
                    )
                )
    return found


def measure(bench: Bench, found: Sequence[Case]) -> None:
    """Take the cases in order. Raises BenchError in the end when some could not be measured."""
    for case in found:
        bench.measure(case)
    bench.finish()
