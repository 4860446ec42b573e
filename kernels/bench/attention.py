"""What `eyas bench attention` measures: forward and backward of all TTT steps of one attention layer, bfloat16.

    fused, flex    kernels.ttt_attention                  eager    its dense reference, the smallest size only
    flex_concat    flex_attention over the concatenated keys and values of all steps so far, compiled, with a block mask
                   a step from a compiled create_block_mask: what others do, in our own plain writing. The masks are
                   made inside the timed region, as every training step has to.
    plain_causal   as many plain causal calls of torch's scaled_dot_product_attention as there are steps, by cuDNN or by
                   flash, whichever was faster in this run (named in shape): the floor.
    flex_mask      construction of the flex backend's BlockMask alone; extra_gib is the memory it holds.

The error is of 4 query heads a key head, bounded inputs, against the dense reference in float64 (plain_causal: against
plain softmax attention).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernels.bench import layouts
from kernels.bench.runner import Bench, Case, Group

GROUPS = {"ours": Group("kernels.bench.attention_case")}
STEPS = 7
TOKENS = (8192, 16384, 32768)
PACKED_TOKENS = 16384
MASK_TOKENS = (32768, 131072)
# Enough rows for the fused backend to take the kernels that it takes for long documents.
PROBLEM_TOKENS = 2304
HEADS = {"heads": 32, "kv_heads": 8, "head_dim": 128}
_TINY_HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 16}


def cases(tokens: Sequence[int] = TOKENS, *, device: str = "cuda", tiny: bool = False) -> list[Case]:
    """Every case. tiny: shapes for a test on the CPU, where flex has no backward and cuDNN does not run."""
    heads = _TINY_HEADS if tiny else HEADS
    steps = 2 if tiny else STEPS
    dtype = "float32" if device == "cpu" else "bfloat16"
    packed = 96 if tiny else PACKED_TOKENS
    problem_tokens = 96 if tiny else PROBLEM_TOKENS
    shape = f"{steps} steps; {heads['heads']}/{heads['kv_heads']} heads x {heads['head_dim']}; {dtype}"
    common = {**heads, "steps": steps, "dtype": dtype}
    gpu = device != "cpu"
    causal = ("plain_causal_cudnn", "plain_causal_flash") if gpu else ("plain_causal_flash",)

    def case(
        layout: str,
        length: int,
        variants: Sequence[str],
        *,
        lengths: Sequence[int] | None = None,
        runs: Sequence[layouts.Span] | None = None,
        problem: Mapping[str, Any],
        supervised: float = 1.0,
        rounds: int = 99,
    ) -> Case:
        return Case(
            work="attention",
            tokens=length,
            vocab=None,
            supervised=supervised,
            shape=f"{layout}; {shape}",
            settings={**common, "document_lengths": lengths or [length], "query_runs": runs},
            variants=dict.fromkeys(variants, "ours"),
            problem={**common, **problem},
            rounds=rounds,
            fastest={"plain_causal": causal} if causal[0] in variants else {},
        )

    found = []
    problem: dict[str, Any]
    one = {"document_lengths": [problem_tokens], "query_runs": None}
    for length in tokens:
        variants = ["fused", *(["flex", "flex_concat"] if gpu else []), *causal]
        if length == min(tokens):
            found.append(case(layouts.ONE_DOCUMENT, length, ["eager"], problem=one, rounds=2))
        found.append(case(layouts.ONE_DOCUMENT, length, variants, problem=one, rounds=3 if length > 20000 else 99))
    lengths = layouts.document_lengths(packed, shortest=8, longest=24) if tiny else layouts.document_lengths(packed)
    small = layouts.document_lengths(problem_tokens, shortest=problem_tokens // 8, longest=problem_tokens // 4)
    variants = ["fused", *(["flex"] if gpu else [])]
    problem = {"document_lengths": small, "query_runs": None}
    found.append(case(layouts.DOCUMENTS, packed, variants, lengths=lengths, problem=problem))
    for layout in (layouts.ANSWER, layouts.TURNS):
        runs = layouts.active_rows(layouts.supervised_spans(packed, layout))
        problem_runs = layouts.active_rows(layouts.supervised_spans(problem_tokens, layout))
        problem = {"document_lengths": [problem_tokens], "query_runs": problem_runs}
        found.append(case(layout, packed, ["fused"], runs=runs, problem=problem, supervised=0.25))
    for length in (256,) if tiny else MASK_TOKENS:
        found.append(
            Case(
                work="attention",
                tokens=length,
                vocab=None,
                supervised=1.0,
                shape=f"mask; {shape}",
                settings={**common, "document_lengths": [length], "mask_only": True},
                variants={"flex_mask": "ours"},
                repeat=3,
            )
        )
    return found


def measure(bench: Bench, found: Sequence[Case]) -> None:
    """Take the cases in order. Raises BenchError in the end when some could not be measured."""
    for case in found:
        bench.measure(case)
    bench.finish()
