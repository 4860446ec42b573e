"""The `train` group of the run config: optimisation, memory against speed, what is kept and looked at.

Fields of one schedule are refused beside another: a schedule that silently ignored them would cost a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.trainer.config_schema import limits_beside

DType = Literal["auto", "bfloat16", "float16", "float32"]

Schedule = Literal[
    "cosine",
    "linear",
    "constant_with_warmup",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "inverse_sqrt",
    "warmup_stable_decay",
]

# accelerate's names; each is the name of the Python package it needs, too.
Tracker = Literal[
    "tensorboard", "wandb", "mlflow", "trackio", "aim", "clearml", "comet_ml", "dvclive", "swanlab",
]  # fmt: skip

# Which schedules a field belongs to.
_SCHEDULE_FIELDS: Mapping[str, tuple[Schedule, ...]] = {
    "decay_steps": ("warmup_stable_decay",),
    "decay_shape": ("warmup_stable_decay",),
    "min_learning_rate_ratio": ("cosine_with_min_lr", "warmup_stable_decay"),
    "restarts": ("cosine_with_restarts",),
}


class Train(BaseModel):
    """Optimisation, and the choices that trade memory for speed."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=limits_beside)

    steps: int = Field(10000, ge=1, title="Optimizer steps", description="Length of the run, in updates of the draft.")
    ttt_steps: int = Field(7, ge=1, le=32, title="TTT steps", description="Unrolled draft steps per sequence (K).")
    step_loss_decay: float = Field(
        0.8, gt=0.0, le=1.0, title="Step loss decay", description="Weight of TTT step k is decay^k / K."
    )
    pack_tokens: int = Field(
        4096,
        ge=8,
        title="Pack (tokens)",
        description="Whole documents are packed into rows of up to this length; longer ones: see data.long_documents.",
    )
    grad_accumulation: int = Field(
        1,
        ge=1,
        title="Packs per step",
        description="Packs of one optimizer step, over all ranks: the same step on any number of GPUs.",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        title="Optimizer",
        description="muon: Muon for the layers' matrices and fc, its updates scaled to AdamW's size so that one "
        "learning rate serves both; AdamW for the head and the norms.",
    )
    learning_rate: float = Field(1e-4, gt=0.0, title="Learning rate", description="The schedule's highest.")
    schedule: Schedule = Field(
        "cosine",
        title="Schedule",
        description="Of the learning rate after the warm-up, by transformers' names. warmup_stable_decay holds it and "
        "decays over the last steps.",
    )
    warmup_steps: int = Field(
        100, ge=0, title="Warm-up steps", description="First steps, in which the learning rate rises to its highest."
    )
    decay_steps: int | None = Field(
        None,
        ge=1,
        title="Decay (steps)",
        description="The last steps, in which warmup_stable_decay decays. Empty: a tenth of the run's.",
    )
    decay_shape: Literal["linear", "cosine", "1-sqrt"] | None = Field(
        None, title="Decay shape", description="Of warmup_stable_decay. Empty: 1-sqrt."
    )
    min_learning_rate_ratio: float | None = Field(
        None,
        ge=0.0,
        lt=1.0,
        title="Least share of the learning rate",
        description="What cosine_with_min_lr and warmup_stable_decay end at (and warmup_stable_decay's warm-up starts "
        "at). Empty: 0.1 and 0.",
    )
    restarts: int | None = Field(
        None,
        ge=1,
        title="Restarts",
        description="Times that cosine_with_restarts starts again from the learning rate. Empty: 1.",
    )
    weight_decay: float = Field(0.0, ge=0.0, title="Weight decay", description="Of matrices; norms have none.")
    adam_betas: tuple[float, float] = Field(
        (0.9, 0.95), title="Adam betas", description="Decay of AdamW's first and second moment."
    )
    muon_momentum: float | None = Field(
        None, ge=0.0, lt=1.0, title="Muon momentum", description="Nesterov's, of optimizer muon. Empty: 0.95."
    )
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
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", title="Device", description="auto: the GPU, where the worker has one."
    )
    nproc: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        title="Ranks a machine",
        description="Processes, each with a GPU of its own (on a CPU: sharing it). auto: every GPU of the machine that "
        "has a pack in each optimizer step (grad_accumulation counts the packs of all ranks).",
    )
    nnodes: int = Field(
        1,
        ge=1,
        title="Machines",
        description="Each runs the stage with nproc ranks, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT in its "
        "environment, as for torchrun.",
    )
    sharding: Literal["ddp", "fsdp"] = Field(
        "ddp",
        title="Sharding",
        description="Of several ranks. ddp: each holds the whole draft and optimizer. fsdp (FSDP2): each keeps its "
        "share of masters, moments and gradients, 12 bytes a parameter divided by the ranks.",
    )
    context_parallel: int = Field(
        1,
        ge=1,
        title="Ranks a pack",
        description="Ranks that share each pack along its tokens, for contexts that one GPU cannot train. 1: each rank "
        "trains packs of its own. Online, each still runs the target on whole documents.",
    )
    rank_timeout: float = Field(
        30.0,
        ge=5.0,
        title="Rank timeout (s)",
        description="How long ranks wait for one that is behind before the run ends and names it. Raise it where one "
        "pack, or one read of a slow store, takes longer.",
    )
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
    checkpoint_every: int = Field(
        500, ge=1, title="Checkpoint every (steps)", description="What a run that is killed may lose, at most."
    )
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
    export_layout: Literal["sglang", "vllm", "speculators"] = Field(
        "sglang",
        title="Layout of the export",
        description="sglang: SGLang and vLLM load it, and SpecForge. vllm: vLLM's own names. speculators: vLLM and the "
        "package speculators; vLLM finds the target by itself.",
    )
    max_grad_norm_ratio: float = Field(
        100.0,
        ge=0.0,
        title="Gradient alarm",
        description="Stop when a gradient's norm is so many times the median of the last 100 steps; its samples "
        "are written to the run directory. 0: never.",
    )
    trackers: tuple[Tracker, ...] = Field(
        ("tensorboard",),
        title="Trackers",
        description="Who shows the metrics, besides metrics.jsonl. tensorboard, wandb (offline unless WANDB_MODE says "
        "otherwise) and mlflow (local unless MLFLOW_TRACKING_URI does) write to the run directory and append when "
        "a run continues; others begin another run there. What is not installed on the worker is refused.",
    )
    tracker_project: str = Field(
        "eyas", min_length=1, title="Project", description="The runs' project (MLflow: experiment) in trackers."
    )
    profile: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        title="Profile (steps)",
        description="Steps whose trace is written to the run directory, counted from 1: the first few are not like the "
        "others. Opens in Perfetto.",
    )
    memory_snapshot: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        title="Memory snapshot (steps)",
        description="Steps whose CUDA allocations are written to the run directory. Opens in PyTorch's memory viewer.",
    )
    seed: int = Field(0, ge=0, title="Seed", description="Order of the data and initial weights.")

    @model_validator(mode="after")
    def _check(self) -> Train:
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} is more than steps={self.steps}; the learning rate would never "
                f"be reached: use at most {self.steps}"
            )
        for name, owners in _SCHEDULE_FIELDS.items():
            if getattr(self, name) is not None and self.schedule not in owners:
                raise ValueError(
                    f"{name}={getattr(self, name)} is of schedule={' and '.join(owners)}, but "
                    f"schedule={self.schedule}; leave {name} out, or change the schedule"
                )
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers={list(self.trackers)} names one twice; name each once")
        for name in ("profile", "memory_snapshot"):
            if any(step > self.steps for step in getattr(self, name)):
                raise ValueError(
                    f"{name}={list(getattr(self, name))} has steps past steps={self.steps}; name earlier ones"
                )
        if self.muon_momentum is not None and self.optimizer != "muon":
            raise ValueError(
                f"muon_momentum={self.muon_momentum} is of optimizer=muon, but optimizer={self.optimizer}; leave "
                "muon_momentum out, or change the optimizer"
            )
        if self.nproc != "auto" and self.nproc * self.nnodes % self.context_parallel:
            raise ValueError(
                f"context_parallel={self.context_parallel} does not divide the {self.nproc * self.nnodes} ranks of "
                f"nproc={self.nproc} and nnodes={self.nnodes}; use a multiple of it"
            )
        if self.schedule == "warmup_stable_decay" and self.warmup_steps + self.num_decay_steps > self.steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and {self.num_decay_steps} steps of decay are more than "
                f"steps={self.steps}; use fewer of either"
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

    @property
    def num_decay_steps(self) -> int:
        """Last steps in which warmup_stable_decay decays."""
        return max(1, self.steps // 10) if self.decay_steps is None else self.decay_steps
