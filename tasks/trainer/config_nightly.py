"""Nightly retraining: a run config whose data grows, and what decides whether its draft becomes the champion.

The groups are those of a run, with the same names; `data.source` is a glob here and `data.heldout_source` the fixed
held-out set. So a recipe for `eyas train` becomes one for `eyas nightly` by adding the `nightly` group. Free of torch,
as the form is drawn from it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tasks.trainer.config import Data, Draft, Evaluate, HiddenStates, Online, RunConfig, Target, Train
from tasks.trainer.config_schema import limits_beside
from tasks.trainer.errors import InputError
from tasks.trainer.recipe import load_config, read_values, sentences

logger = logging.getLogger(__name__)


class Nightly(BaseModel):
    """What a night trains on, and what its draft must show to become the champion."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=limits_beside)

    home: str = Field(
        "runs/nightly",
        min_length=1,
        title="Home",
        description="Folder or s3:// URL of the champion, its history and the nights' runs: one for each target and "
        "draft that is served.",
    )
    min_new: int = Field(
        100,
        ge=1,
        title="Least new (conversations)",
        description="With fewer that are new, a night ends early and leaves them to the next one.",
    )
    replay: float = Field(
        0.5,
        ge=0.0,
        lt=1.0,
        title="Replay",
        description="Share of a night's training conversations that the champion was trained on before, drawn anew "
        "each night.",
    )
    recent_heldout: float = Field(
        0.1,
        gt=0.0,
        le=0.5,
        title="Recent held-out share",
        description="Share of the new prompts that no night ever trains on; tonight's are what the draft is judged on.",
    )
    min_recent: int = Field(
        16,
        ge=2,
        title="Least recent held-out (prompts)",
        description="With fewer of them nothing could be judged: the night ends early.",
    )
    num_prompts: int = Field(
        128, ge=2, title="Judged on (prompts)", description="At most so many of the fixed held-out set, and as many "
        "recent ones."
    )  # fmt: skip
    significance: float = Field(
        0.05,
        gt=0.0,
        lt=0.5,
        title="Significance",
        description="How often a draft that is no better may pass for better by chance, at most.",
    )
    tolerance: float = Field(
        0.02,
        ge=0.0,
        lt=1.0,
        title="Tolerance",
        description="Not worse on the fixed held-out set: by less than this share of the champion's tau, at the same "
        "significance.",
    )
    floor: Literal["ngram", "untrained"] = Field(
        "ngram",
        title="First champion beats",
        description="What the first draft must beat: ngram (n-gram lookup, which costs nothing, and the draft before "
        "training), or untrained (the latter alone).",
    )
    first_steps: int | None = Field(
        None,
        ge=1,
        title="Steps of the first night",
        description="Optimizer steps while there is no champion to start from. Empty: train.steps.",
    )
    keep_nights: int = Field(
        7,
        ge=1,
        title="Nights kept",
        description="Data and runs of so many nights are kept, and those of every draft in the champion's history.",
    )


class NightlyConfig(BaseModel):
    """All parameters of a night."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: Target
    data: Data
    hidden_states: HiddenStates = Field(Online(), title="Hidden states")
    draft: Draft = Draft()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    nightly: Nightly = Nightly()
    scratch_dir: str | None = Field(
        None,
        title="Scratch folder",
        description="Local folder that nights of a remote home work in. Empty: EYAS_SCRATCH, or ~/.cache/eyas.",
    )

    @model_validator(mode="after")
    def _check(self) -> NightlyConfig:
        if self.data.heldout_source is None:
            raise ValueError(
                "data.heldout_source is missing: nights are judged on a fixed held-out set, give its JSONL file"
            )
        if self.data.more_sources:
            raise ValueError(
                f"data.more_sources={list(self.data.more_sources)}: a night reads data.source alone; make it a glob "
                "that matches all files"
            )
        if self.data.heldout_fraction == 0.0 or self.data.heldout_fraction + self.nightly.recent_heldout >= 1.0:
            raise ValueError(
                f"data.heldout_fraction={self.data.heldout_fraction} of the prompts choose the checkpoint and "
                f"nightly.recent_heldout={self.nightly.recent_heldout} judge it; both must be more than 0, together "
                "less than 1"
            )
        return self

    def run_config(self, **changes: Any) -> RunConfig:
        """The config of one run of these groups. changes: keys of RunConfig in place of this config's.

        Raises InputError when they do not go together.
        """
        groups = {name: getattr(self, name) for name in RunConfig.model_fields if name in type(self).model_fields}
        try:
            return RunConfig(**{**groups, **changes})
        except ValidationError as error:
            raise InputError("; ".join(sentences(error))) from None


def load_nightly(values: Mapping[str, Any], *, where: str = "config") -> NightlyConfig:
    """Validate a nightly recipe as strictly as a run's. Raises InputError, a line for each fault."""
    if not isinstance(values, Mapping):
        raise InputError(f"{where}: expected a mapping of groups (target, data, ...), got {type(values).__name__}")
    rest = {name: value for name, value in values.items() if name not in ("nightly", "run_dir")}
    if "run_dir" in values:
        logger.warning("%s: run_dir=%r is of a single run and is not used; nights lie in nightly.home", where,
                       values["run_dir"])  # fmt: skip
    run = load_config(rest, where=where)
    try:
        nightly = Nightly.model_validate(values.get("nightly", {}))
    except ValidationError as error:
        raise InputError(f"{where}: " + "; ".join(sentences(error, group="nightly", model=Nightly))) from None
    groups = {name: getattr(run, name) for name in NightlyConfig.model_fields if name != "nightly"}
    try:
        return NightlyConfig(**groups, nightly=nightly)
    except ValidationError as error:
        raise InputError(f"{where}: " + "; ".join(sentences(error, model=NightlyConfig))) from None


def nightly_from_form(values: Mapping[str, Any]) -> NightlyConfig:
    """Validate the flow's parameters, as recipe.config_from_form does for a run's. Raises InputError."""
    try:
        return NightlyConfig.model_validate(values)
    except ValidationError as error:
        raise InputError("parameters: " + "; ".join(sentences(error, model=NightlyConfig))) from None


def read_nightly(path: str, overrides: Sequence[str] = (), *, home: str | None = None) -> NightlyConfig:
    """Read a YAML recipe with a `nightly` group. home: in place of nightly.home. Raises InputError as read_config."""
    values = read_values(path, overrides)
    if home is not None:
        nightly = values.get("nightly", {})
        values["nightly"] = {**nightly, "home": home} if isinstance(nightly, Mapping) else nightly
    return load_nightly(values, where=path)
