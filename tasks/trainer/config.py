"""The run config: one schema for the YAML recipe, the command line and the flow's parameters.

Everything here is pydantic and free of torch, because the Prefect worker imports it to draw the run form. Strictness
costs users a refused run now and then; it saves them from the run that silently trained with a default because a key
was misspelt. Files and `--set` come in through recipe.py; the flow's parameters are these very models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.trainer.config_states import HiddenStates, Offline, Online, stored_encoding
from tasks.trainer.parent import parent_digest

__all__ = [
    "Data",
    "Draft",
    "Evaluate",
    "HiddenStates",
    "Offline",
    "Online",
    "RunConfig",
    "Target",
    "Train",
    "identity_fields",
]

DType = Literal["auto", "bfloat16", "float16", "float32"]


class _Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Target(_Group):
    """The frozen model that the draft learns to predict."""

    model: str = Field(
        title="Model",
        description="Folder, hub id or .gguf file of the target. package://NAME/FILE is a file that an installed "
        "Python package carries.",
    )
    revision: str | None = Field(None, title="Revision", description="Hub revision; empty for the default.")
    dtype: DType = Field(
        "auto",
        title="Data type",
        description="Type the target computes in. auto: the checkpoint's own on a GPU; on a CPU bfloat16 where the "
        "processor multiplies it natively, else float32.",
    )
    aux_layer_ids: tuple[int, int, int] | None = Field(
        None,
        title="Auxiliary layers",
        description="0-based output layers whose hidden states feed the draft, ascending. Empty: 1, L//2-1, L-4.",
    )
    chat_template: str | None = Field(
        None, title="Chat template", description="Jinja file to use instead of the target's own template."
    )


class Data(_Group):
    """Conversations: where they come from and how they are cut."""

    source: str = Field(title="Source", description="JSONL file or fsspec URL with training conversations.")
    heldout_source: str | None = Field(
        None,
        title="Held-out source",
        description="JSONL with held-out conversations. Empty: a share of the source is held out.",
    )
    heldout_fraction: float = Field(
        0.02,
        ge=0.0,
        lt=1.0,
        title="Held-out share",
        description="Share of the source's prompts kept for evaluation when there is no held-out source.",
    )
    max_tokens: int = Field(
        4096, ge=8, title="Longest sample (tokens)", description="Longer conversations are cut or refused."
    )
    on_long: Literal["cut", "refuse"] = Field(
        "cut", title="Too long", description="What to do with conversations over the longest sample."
    )
    long_documents: Literal["alone", "cut", "refuse"] = Field(
        "alone",
        title="Longer than a pack",
        description="Training samples of more than train.pack_tokens: alone (a row of their own, which then takes more "
        "memory than a pack), cut to the pack, or refused.",
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop", title="Bad records", description="stop at the first bad record, or skip and count it by reason."
    )
    regenerate: bool = Field(
        False,
        title="Regenerate answers",
        description="Replace every assistant turn by the target's own answer before training.",
    )
    regenerate_dir: str | None = Field(
        None,
        title="Regenerated answers",
        description="Local folder that keeps regenerated answers, shared between runs. Empty: in the run directory.",
    )
    max_new_tokens: int = Field(
        512, ge=1, title="Longest answer (tokens)", description="Limit of a regenerated answer."
    )
    batch_size: int = Field(32, ge=1, title="Regeneration batch", description="Prompts answered at once.")
    temperature: float = Field(0.0, ge=0.0, le=2.0, title="Temperature", description="Of regeneration; 0 is greedy.")
    seed: int = Field(0, ge=0, title="Seed", description="Seed of regeneration when it samples.")
    date_string: str = Field(
        "26 Jul 2024",
        title="Date in the template",
        description="For chat templates that print today's date: a fixed one, so that tomorrow the same conversation "
        "still is the same sample.",
    )


class Draft(_Group):
    """Shape of the draft. What is left empty follows the target."""

    variant: Literal["eagle3", "eagle3.1"] = Field(
        "eagle3",
        title="Variant",
        description="eagle3.1: a norm for each auxiliary layer before fc, and each draft step reads the normed output "
        "of the one before. Older engines know eagle3 only.",
    )
    vocab_size: int | None = Field(
        32000,
        ge=16,
        title="Draft vocabulary",
        description="Number of tokens the draft can propose, by frequency in the training answers. Empty: all of "
        "the target's.",
    )
    num_layers: int = Field(
        1,
        ge=1,
        le=16,
        title="Layers",
        description="Decoder layers. Each more costs its own share of every drafted token, and of training step 0 of "
        "all rows.",
    )
    intermediate_size: int | None = Field(None, ge=8, title="MLP width", description="Empty: the target's.")
    num_heads: int | None = Field(None, ge=1, title="Query heads", description="Empty: the target's.")
    num_kv_heads: int | None = Field(None, ge=1, title="Key/value heads", description="Empty: the target's.")
    head_dim: int | None = Field(None, ge=8, title="Head dimension", description="Empty: the target's.")
    start: Literal["random", "target_layer"] = Field(
        "random",
        title="Start",
        description="Weights before training: random projections, or the target's last layer and final norm reading "
        "the highest auxiliary state (LLaMA-like targets, same sizes). The head always starts from the target's rows.",
    )
    init: str | None = Field(
        None,
        title="Warm start",
        description="Folder of an earlier draft to start from, in place of `start`: a checkpoint of a run, an export, "
        "or SpecForge's layout, of the same sizes. Draft tokens that are new to it start from the target's rows.",
    )

    @model_validator(mode="after")
    def _check(self) -> Draft:
        if self.init is not None and self.start != "random":
            raise ValueError(
                f"start={self.start} and init={self.init!r} are two starts; use start=random (the default) with init"
            )
        if self.variant == "eagle3.1" and self.start == "target_layer":
            raise ValueError(
                "start=target_layer goes with variant=eagle3 only: eagle3.1 norms the state that the target's layer "
                "adds to, so the draft would not start as that layer; use start=random"
            )
        return self


class Train(_Group):
    """Optimisation, and the choices that trade memory for speed."""

    steps: int = Field(10000, ge=1, title="Optimizer steps")
    ttt_steps: int = Field(7, ge=1, le=32, title="TTT steps", description="Unrolled draft steps per sequence (K).")
    step_loss_decay: float = Field(
        0.8, gt=0.0, le=1.0, title="Step loss decay", description="Weight of TTT step k is decay^k / K."
    )
    pack_tokens: int = Field(
        4096,
        ge=8,
        title="Pack (tokens)",
        description="Whole documents are packed into rows of this length; a longer document is a row alone.",
    )
    grad_accumulation: int = Field(1, ge=1, title="Gradient accumulation", description="Packs per optimizer step.")
    learning_rate: float = Field(1e-4, gt=0.0, title="Learning rate")
    warmup_steps: int = Field(100, ge=0, title="Warm-up steps")
    weight_decay: float = Field(0.0, ge=0.0, title="Weight decay")
    adam_betas: tuple[float, float] = Field((0.9, 0.95), title="Adam betas")
    max_grad_norm: float = Field(1.0, gt=0.0, title="Gradient clipping", description="Limit of the global norm.")
    attention: Literal["auto", "eager", "flex", "fused"] = Field(
        "auto",
        title="Attention",
        description="TTT attention: eager (reference, quadratic memory), flex (flex_attention; CUDA), fused (fused "
        "base block merged through the log-sum-exp). auto logs its choice.",
    )
    loss: Literal["auto", "linear", "triton", "torch"] = Field(
        "auto",
        title="Loss",
        description="linear (head and loss in one, a chunk of rows at a time: no logits are stored), triton (logits, "
        "gradient written over them), torch (reference). auto is linear.",
    )
    objective: Literal["soft_cross_entropy", "lk_alpha", "lk_lambda", "total_variation"] = Field(
        "soft_cross_entropy",
        title="Objective",
        description="soft_cross_entropy: against the target's distribution. The others aim at the acceptance rate "
        "alpha: lk_alpha is -log(alpha), total_variation 1 - alpha, lk_lambda mixes cross entropy and total variation "
        "by lambda = exp(-decay * alpha) (LK losses, arXiv:2602.23881).",
    )
    temperature: float = Field(
        1.0,
        gt=0.0,
        le=10.0,
        title="Loss temperature",
        description="Divides the logits of target and draft in soft_cross_entropy. Metrics stay at 1.",
    )
    lk_decay: float = Field(
        3.0, ge=0.0, title="LK decay", description="How fast lk_lambda leaves cross entropy as alpha grows."
    )
    lk_mixing: Literal["row", "step"] = Field(
        "row",
        title="LK mixing",
        description="lk_lambda's lambda from each row's own alpha, or one a TTT step from the mean alpha of the "
        "optimizer step before.",
    )
    dtype: DType = Field(
        "auto",
        title="Data type",
        description="Type the draft computes in; masters are always float32. auto: as for the target.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", title="Device")
    checkpointing: Literal["none", "mlp", "step"] = Field(
        "none",
        title="Activation checkpointing",
        description="What is computed again in the backward to save memory: nothing, the MLP, or whole TTT steps.",
    )
    mlp_chunk_rows: int | None = Field(
        None,
        ge=128,
        title="MLP chunk (rows)",
        description="Rows of the MLP at once. Empty: all. With checkpointing, chunks bound what it needs for a moment.",
    )
    compile: Literal["auto", "always", "never"] = Field(
        "auto",
        title="Compile",
        description="torch.compile for the layer's pieces, once for all lengths. auto: on CUDA, where it saves memory "
        "and time; on a CPU the first step would wait a minute for it.",
    )
    deterministic: bool = Field(
        False, title="Deterministic", description="Deterministic algorithms on CUDA (slower). The CPU always is."
    )
    checkpoint_every: int = Field(500, ge=1, title="Checkpoint every (steps)")
    keep_checkpoints: int = Field(
        2, ge=1, title="Checkpoints kept", description="The newest so many; the best by held-out tau is kept as well."
    )
    evaluate_every: int = Field(
        1000,
        ge=0,
        title="Evaluate every (steps)",
        description="Teacher-forced loss, accuracy, alpha and simulated tau on held-out samples, and after the "
        "last step. 0, or more than the run's steps: never.",
    )
    evaluate_tokens: int = Field(
        32768,
        ge=8,
        title="Evaluate on (tokens)",
        description="At most so many held-out tokens, whole samples, the same every time.",
    )
    export: Literal["best", "last"] = Field(
        "best",
        title="Exported checkpoint",
        description="best: the evaluated checkpoint of the highest simulated tau, where training evaluates. last: the "
        "newest.",
    )
    max_grad_norm_ratio: float = Field(
        100.0,
        ge=0.0,
        title="Gradient alarm",
        description="Stop when a gradient's norm is so many times the median of the last 100 steps; its samples "
        "are written to the run directory. 0: never.",
    )
    seed: int = Field(0, ge=0, title="Seed", description="Order of the data and initial weights.")

    @model_validator(mode="after")
    def _check(self) -> Train:
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} is more than steps={self.steps}; the learning rate would never "
                f"be reached: use at most {self.steps}"
            )
        if 0.0 < self.max_grad_norm_ratio <= 1.0:
            raise ValueError(
                f"max_grad_norm_ratio={self.max_grad_norm_ratio} would stop at ordinary steps; use 10 or more, or 0"
            )
        if self.attention == "flex" and self.device == "cpu":
            raise ValueError(
                "attention=flex cannot train on device=cpu (flex_attention has no backward there); use fused"
            )
        if self.temperature != 1.0 and self.objective != "soft_cross_entropy":
            raise ValueError(
                f"temperature={self.temperature} goes with objective=soft_cross_entropy only: alpha is what "
                f"{self.objective} is about, and it is known at temperature 1; use temperature=1"
            )
        if self.dtype == "float16":
            raise ValueError("dtype=float16 needs loss scaling, which Eyas does not do; use bfloat16 or float32")
        return self

    @property
    def evaluates(self) -> bool:
        """Whether training looks at held-out samples."""
        return 0 < self.evaluate_every <= self.steps


class Evaluate(_Group):
    """Acceptance measured by real speculative decoding on held-out prompts."""

    num_prompts: int = Field(64, ge=2, title="Prompts", description="Held-out prompts decoded.")
    max_new_tokens: int = Field(128, ge=9, title="Longest answer (tokens)")
    draft_tokens: int = Field(
        4, ge=1, le=32, title="Draft length", description="Tokens drafted in a chain before the target verifies."
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
    bootstrap_samples: int = Field(2000, ge=100, title="Bootstrap samples")
    seed: int = Field(0, ge=0, title="Seed", description="Of the bootstrap.")


class RunConfig(_Group):
    """A complete run."""

    target: Target
    data: Data
    hidden_states: HiddenStates = Field(Online(), title="Hidden states")
    draft: Draft = Draft()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    run_dir: str = Field(
        "runs/default",
        title="Run directory",
        description="Folder or fsspec URL (s3://, gs://) for everything the run leaves.",
    )
    scratch_dir: str | None = Field(
        None,
        title="Scratch folder",
        description="Local folder that a run with a remote run_dir works in. Empty: EYAS_SCRATCH, or ~/.cache/eyas.",
    )

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        if self.data.heldout_source is None and self.data.heldout_fraction == 0.0:
            raise ValueError(
                "data.heldout_fraction=0 without data.heldout_source leaves nothing to evaluate on; set one of them"
            )
        encoding = stored_encoding(self.hidden_states)
        if encoding is not None and encoding.last == "topk":
            why = f"soft targets are the top {encoding.top_k} tokens (hidden_states.last=topk)"
            if self.train.loss not in ("auto", "linear"):
                raise ValueError(f"train.loss={self.train.loss}: {why}, which only train.loss=linear takes; use it")
            if self.train.temperature != 1.0:
                raise ValueError(
                    f"train.temperature={self.train.temperature}: {why}, whose tail is known at temperature 1 only; "
                    "use 1, or hidden_states.last=hidden"
                )
        return self


# These keys do not change what is trained: a run may be continued with other values.
_NOT_IDENTITY: Mapping[str, frozenset[str]] = {
    "data": frozenset({"regenerate_dir"}),
    "train": frozenset(
        {
            "checkpoint_every",
            "keep_checkpoints",
            "checkpointing",
            "mlp_chunk_rows",
            "compile",
            # What is looked at, kept and exported; the masters are the same.
            "evaluate_every",
            "evaluate_tokens",
            "export",
            "max_grad_norm_ratio",
        }
    ),
}


def identity_fields(config: RunConfig) -> dict[str, Any]:
    """The config's part of the run's identity: every field that changes the trained draft.

    Where states are kept, cached and compressed without loss, how often checkpoints are written and what is computed
    twice to save memory do not (beyond rounding): a run that ran out of memory continues with train.checkpointing. What
    a store loses does, a preset and the same steps by hand being the same; without a store, nothing is lost.
    """
    dumped = config.model_dump(mode="json", exclude={"run_dir", "scratch_dir", "evaluate", "hidden_states"})
    if config.draft.init is not None:
        dumped["draft"]["init"] = parent_digest(config.draft.init)
    encoding = stored_encoding(config.hidden_states)
    dumped["hidden_states"] = {"mode": config.hidden_states.mode}
    if encoding is not None and not encoding.lossless:
        lossy = ("aux_step", "last", "last_step", "top_k")
        dumped["hidden_states"] |= {name: getattr(encoding, name) for name in lossy}
    for group, keys in _NOT_IDENTITY.items():
        for key in keys:
            dumped[group].pop(key, None)
    return dumped
