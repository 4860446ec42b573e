"""The run config: one schema for the YAML recipe, the command line and the flow's parameters.

Everything here is pydantic and free of torch, because the Prefect worker imports it to draw the run form. Strictness
costs users a refused run now and then; it saves them from the run that silently trained with a default because a key
was misspelt. Files and `--set` come in through recipe.py; the flow's parameters are these very models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.trainer.config_evaluate import Evaluate
from tasks.trainer.config_schema import limits_beside
from tasks.trainer.config_states import Auto, HiddenStates, Offline, Online, stored_encoding
from tasks.trainer.config_train import DType, Train
from tasks.trainer.parent import parent_digest

__all__ = [
    "Auto",
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
    "placed",
]


class _Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=limits_beside)


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
    pack_documents: Literal["auto", "always", "never"] = Field(
        "auto",
        title="Documents share forwards",
        description="Several documents in one forward of the target, kept apart exactly. auto: on a GPU, unless "
        "train.deterministic; it hides the launches of short documents, and a third of the bfloat16 values differ in "
        "their last bit from those of a document alone.",
    )
    parallel: Literal["replica", "tensor"] = Field(
        "replica",
        title="Over several GPUs",
        description="replica: each rank has the target. tensor: the ranks of capture and training share one, by "
        "transformers' tensor parallelism, for targets that do not fit on each GPU; the other stages need it on one.",
    )


class Data(_Group):
    """Conversations: where they come from and how they are cut."""

    source: str = Field(
        title="Source",
        description="Training conversations: a file (JSON Lines, JSON, Parquet, Arrow; gz, zst), a glob, or a folder "
        "of such files, also one that datasets saved; any fsspec URL.",
    )
    more_sources: tuple[str, ...] = Field((), title="More sources", description="Trained on beside the source.")
    weights: tuple[Annotated[float, Field(gt=0.0)], ...] = Field(
        (),
        title="Weights",
        description="Shares of the conversations, the source first, then more_sources: as many as these shares allow "
        "are drawn, none twice. Empty: all of all.",
    )
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
    on_truncated: Literal["stop", "keep"] = Field(
        "stop",
        title="Truncated files",
        description="stop at a file that ends in the middle of a record or of its compression, or keep its whole "
        "records.",
    )
    supervise: Literal["all", "last"] = Field(
        "all", title="Supervise", description="Train on all answers of a conversation, or on its last one only."
    )
    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        title="Processes",
        description="That render and tokenise; samples and their order do not depend on it. auto: one a processor, "
        "where there are many conversations.",
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
    regenerate_servers: tuple[str, ...] = Field(
        (),
        title="Regeneration servers",
        description="Base URLs of OpenAI-compatible servers of the target (SGLang, vLLM), http://127.0.0.1:30000/v1. "
        "Empty: the target answers in the run itself. A key comes from OPENAI_API_KEY.",
    )
    regenerate_model: str | None = Field(
        None, title="Model on the servers", description="Its name there. Empty: the one that each server lists."
    )
    max_new_tokens: int = Field(
        512, ge=1, title="Longest answer (tokens)", description="Limit of a regenerated answer."
    )
    batch_size: int = Field(
        32, ge=1, title="Regeneration batch", description="Prompts answered at once (by each server)."
    )
    temperature: float = Field(0.0, ge=0.0, le=2.0, title="Temperature", description="Of regeneration; 0 is greedy.")
    temperatures: tuple[Annotated[float, Field(ge=0.0, le=2.0)], ...] = Field(
        (),
        title="Temperature mix",
        description="In place of the temperature: each prompt draws one of these, [0, 0, 0.7] being greedy for two in "
        "three.",
    )
    seed: int = Field(0, ge=0, title="Seed", description="Seed of regeneration when it samples.")
    date_string: str = Field(
        "26 Jul 2024",
        title="Date in the template",
        description="For chat templates that print today's date: a fixed one, so that tomorrow the same conversation "
        "still is the same sample.",
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """All of them, in the order of weights."""
        return (self.source, *self.more_sources)

    @model_validator(mode="after")
    def _check(self) -> Data:
        if self.weights and len(self.weights) != len(self.sources):
            raise ValueError(
                f"weights={list(self.weights)} are {len(self.weights)} for {len(self.sources)} sources; give one for "
                "source and one for each of more_sources, or none"
            )
        if self.temperatures and self.temperature:
            raise ValueError(
                f"temperature={self.temperature} and temperatures={list(self.temperatures)} are two ways to say it; "
                "leave temperature out"
            )
        for url in self.regenerate_servers:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
                raise ValueError(
                    f"regenerate_servers: the one on host {parts.hostname} is no plain http:// or https:// URL; write "
                    "http://HOST:PORT/v1, and put a key in OPENAI_API_KEY"
                )
        if self.regenerate_servers and not self.regenerate:
            raise ValueError("regenerate_servers are given but regenerate is false; set regenerate=true, or give none")
        return self


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
    vocabulary: Literal["data", "parent"] = Field(
        "data",
        title="Vocabulary from",
        description="The draft's tokens: data (the most frequent ones, vocab_size many), or parent (those of the warm "
        "start, so that all its rows go on).",
    )

    @model_validator(mode="after")
    def _check(self) -> Draft:
        if self.vocabulary == "parent" and self.init is None:
            raise ValueError("vocabulary=parent takes a warm start's tokens, and init is empty; use vocabulary=data")
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
        description="Folder or fsspec URL (s3://, gs://) for everything the run leaves. {identity} stands for a hash "
        "of the fields that decide the result: the same run again continues, another one gets a place of its own.",
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
        if self.target.parallel == "tensor" and isinstance(self.hidden_states, Online) and self.hidden_states.store_url:
            raise ValueError(
                "target.parallel=tensor: each rank would ask the target for other samples that the store lacks, and a "
                "forward is all ranks'; use hidden_states.mode=offline, which fills the store first, or leave "
                "store_url out"
            )
        if self.train.context_parallel > 1 and isinstance(self.hidden_states, Online) and self.hidden_states.store_url:
            raise ValueError(
                f"train.context_parallel={self.train.context_parallel}: ranks that share a pack would each write it to "
                "hidden_states.store_url; use hidden_states.mode=offline, which fills the store first, or leave "
                "store_url out"
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
    "target": frozenset({"parallel"}),
    # Who answers is not what is answered; which answers there are is in the prepared data, and so in what trains.
    "data": frozenset({"regenerate_dir", "regenerate_servers", "workers"}),
    "train": frozenset(
        {
            "checkpoint_every",
            "keep_checkpoints",
            # Who computes which pack of a step, not what the step is (beyond rounding).
            "nproc",
            "nnodes",
            "sharding",
            "context_parallel",
            "rank_timeout",
            "checkpointing",
            "mlp_chunk_rows",
            "compile",
            # What is looked at, kept and exported; the masters are the same.
            "evaluate_every",
            "evaluate_tokens",
            "export",
            "export_layout",
            "max_grad_norm_ratio",
            "trackers",
            "tracker_project",
            "profile",
            "memory_snapshot",
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


def placed(config: RunConfig) -> RunConfig:
    """The config with `{identity}` in run_dir replaced by 10 hex digits of a hash of the run's identity.

    One deployment starts many runs, and a run directory holds one: without a name that follows from the values, each
    run of the form would need a new one by hand, and a rerun that is to continue would need the old one.
    """
    if "{identity}" not in config.run_dir:
        return config
    text = json.dumps(identity_fields(config), sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
    return config.model_copy(update={"run_dir": config.run_dir.replace("{identity}", digest)})
