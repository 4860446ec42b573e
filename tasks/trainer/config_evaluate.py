"""The `evaluate` group of the run config: what is decoded to measure a draft, and how.

None of it changes the trained draft, so none of it is in a run's identity: measuring otherwise is the same run.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.trainer.config_schema import limits_beside
from tasks.trainer.config_train import DType

HELDOUT = "heldout"


class Evaluate(BaseModel):
    """Acceptance measured by real speculative decoding on held-out prompts."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=limits_beside)

    prompts: list[str] = Field(
        [HELDOUT],
        min_length=1,
        title="Prompt sets",
        description="heldout: the run's held-out conversations. Anything else: a JSONL file, path or fsspec URL, of "
        '{"turns": [...]}, {"question": ...} or {"prompt": ...} a line, as MT-bench, GSM8K and HumanEval come; several '
        "turns are played one after the other. Each set is a domain of the report.",
    )
    num_prompts: int = Field(64, ge=2, title="Prompts", description="Conversations decoded, of each set at most.")
    max_new_tokens: int = Field(
        128, ge=9, title="Longest answer (tokens)", description="Where the decoding of a prompt stops."
    )
    drafting: Literal["chain", "tree"] = Field(
        "chain",
        title="Drafting",
        description="chain: one token after another. tree: EAGLE-2's dynamic tree, several continuations at once, of "
        "which the target verifies all in one forward.",
    )
    draft_tokens: int = Field(
        4, ge=1, le=32, title="Draft length", description="Tokens drafted in a chain before the target verifies."
    )
    tree_depth: int = Field(
        5, ge=1, le=32, title="Tree depth", description="With drafting=tree: the longest branch in tokens."
    )
    tree_top_k: int = Field(
        8,
        ge=1,
        le=64,
        title="Tree width",
        description="With drafting=tree: candidates after each token, and tokens of a level that are drafted on from.",
    )
    tree_tokens: int = Field(
        32,
        ge=1,
        le=512,
        title="Tree tokens",
        description="With drafting=tree: tokens of the whole tree that the target verifies, the likeliest of all.",
    )
    temperature: float = Field(
        0.0,
        ge=0.0,
        le=10.0,
        title="Temperature",
        description="0: greedy, and every answer must be the target's own. Above: the target's distribution is "
        "sampled, and emitted tokens are tested against it.",
    )
    candidates: Literal["drawn", "top"] = Field(
        "drawn",
        title="Candidates when sampling",
        description="drawn: from the draft's distribution, without replacement, each accepted with probability "
        "min(1, p / q). top: its likeliest tokens, accepted where the target draws one of them, as SGLang serves "
        "trees. Both are exact.",
    )
    context_lengths: list[Annotated[int, Field(ge=16)]] = Field(
        [],
        title="Context lengths (tokens)",
        description="Held-out prompts are measured again, led up to by other held-out conversations until they are so "
        "long: what the draft is worth far into the target's context.",
    )
    batch_size: int = Field(
        8,
        ge=1,
        title="Batch size",
        description="Prompts decoded together. Memory: a key/value cache of so many of the longest.",
    )
    dtype: DType = Field(
        "auto",
        title="Data type",
        description="Type the target decodes in. float32 proves losslessness token for token.",
    )
    tie_margin: float = Field(
        0.25,
        gt=0.0,
        title="Tie margin",
        description="For bfloat16 targets: how far below the maximum logit an emitted token may lie.",
    )
    bootstrap_samples: int = Field(
        2000, ge=100, title="Bootstrap samples", description="Resamplings of the prompts, for the intervals."
    )
    seed: int = Field(0, ge=0, title="Seed", description="Of the bootstrap, and of what is drawn when sampling.")

    @model_validator(mode="after")
    def _check(self) -> Evaluate:
        if len(set(self.prompts)) < len(self.prompts):
            raise ValueError(f"evaluate.prompts={self.prompts} names a set twice; name each once")
        if self.drafting == "tree" and self.tree_tokens < max(self.tree_depth, self.tree_top_k):
            raise ValueError(
                f"evaluate.tree_tokens={self.tree_tokens} holds neither one level of tree_top_k={self.tree_top_k} nor "
                f"one branch of tree_depth={self.tree_depth}; raise it"
            )
        if self.context_lengths and HELDOUT not in self.prompts:
            raise ValueError(
                "evaluate.context_lengths lengthens held-out prompts, and evaluate.prompts leaves heldout out; add it"
            )
        return self

    @property
    def depth(self) -> int:
        """The most tokens that one round can accept."""
        return self.tree_depth if self.drafting == "tree" else self.draft_tokens
