"""Where the target's hidden states come from, and how they are stored: the `hidden_states` group of the run config.

Three modes are three tabs of the form: online, offline, and auto, which leaves the choice between the two to the plan
(plan.py). What they share (the store and its encoding) has the same keys, because Prefect's form carries the values of
one tab over to the other: there they are seen. A preset is a starting point: every part can be set by hand, and what is
left empty is the preset's.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from storage.codecs import CodecName
from storage.errors import StoreError
from storage.presets import PRESETS, Encoding
from tasks.trainer.config_schema import Tabs, mode_form

Preset = Literal["lossless", "near", "compact", "small", "tiny"]
assert set(get_args(Preset)) == set(PRESETS)

# Fields of Encoding that a preset fills and the config may override.
_PARTS = tuple(field.name for field in dataclasses.fields(Encoding))


class _Stored(BaseModel):
    """What both modes know of a store."""

    model_config = ConfigDict(frozen=True, json_schema_extra=mode_form)

    preset: Preset = Field(
        "near",
        title="Preset",
        description="How small the store is, against how exact: lossless (1.5 x smaller than bfloat16), near (2.8 x), "
        "compact (4 x), small (5 x, top-256 targets), tiny (7 x, top-64 targets).",
    )
    aux_step: float | None = Field(
        None,
        ge=0.0,
        title="Auxiliary step",
        description="Quantisation step of the auxiliary states, in standard deviations of a channel. 0: lossless. "
        "Empty: the preset's.",
    )
    last: Literal["hidden", "topk"] | None = Field(
        None,
        title="Soft target",
        description="hidden: the last hidden state. topk: the k most probable tokens and the mass of the others. "
        "Empty: the preset's.",
    )
    last_step: float | None = Field(
        None,
        ge=0.0,
        title="Last-state step",
        description="As the auxiliary step, for the last hidden state. Empty: the preset's.",
    )
    top_k: int | None = Field(
        None, ge=1, title="Top k (tokens)", description="Tokens kept of each soft target. Empty: the preset's, or 256."
    )
    codec: CodecName | None = Field(
        None,
        title="Codec",
        description="Compression of the chunks: zstd, blosc (zstd behind a byte shuffle), raw (none). Empty: the "
        "preset's.",
    )
    level: int | None = Field(
        None, ge=0, title="Codec level", description="Higher is slower and hardly smaller. Empty: the preset's."
    )
    chunk_tokens: int = Field(
        512, ge=16, title="Chunk (tokens)", description="Unit of compression along the token axis."
    )
    shard_tokens: int = Field(
        4096, ge=16, title="Shard (tokens)", description="Unit of writing, an object each; a multiple of the chunk."
    )
    calibration_tokens: int = Field(
        16384,
        ge=1,
        title="Calibration (tokens)",
        description="Tokens of the first samples whose mean and deviation by channel the steps are measured in.",
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_sibling_keys(cls, values: Any) -> Any:
        return _own_keys(cls, values)

    @model_validator(mode="after")
    def _check_encoding(self) -> _Stored:
        if self.shard_tokens % self.chunk_tokens:
            raise ValueError(
                f"shard_tokens={self.shard_tokens} is not a multiple of chunk_tokens={self.chunk_tokens}; "
                f"use {self.chunk_tokens * max(1, round(self.shard_tokens / self.chunk_tokens))}"
            )
        try:
            self.encoding()
        except StoreError as error:
            raise ValueError(f"preset={self.preset} with these changes: {error}") from None
        return self

    def encoding(self) -> Encoding:
        """The preset with every part that was set by hand. A step of 0 is lossless."""
        preset = dataclasses.asdict(PRESETS[self.preset])
        parts = {name: preset[name] for name in _PARTS}
        by_hand = {name: getattr(self, name) for name in _PARTS if getattr(self, name) is not None}
        if self.codec is not None and self.codec != preset["codec"] and self.level is None:
            by_hand["level"] = 0 if self.codec == "raw" else 1
        if self.last is not None and self.last != preset["last"]:
            # The preset's numbers are of the other form.
            parts |= {"last_step": 0.05, "top_k": None} if self.last == "hidden" else {"last_step": None, "top_k": 256}
        parts |= by_hand
        for step in ("aux_step", "last_step"):
            if parts[step] == 0.0:
                parts[step] = None
        return Encoding(**parts)


class Online(_Stored):
    """The target runs beside the draft in every step. With a store, what it computes is kept: each sample goes through
    the target once, until the store's budget is used up."""

    model_config = ConfigDict(frozen=True, title="Online")

    mode: Literal["online"] = Field(
        "online", title="Mode", description="The tab that is open.", json_schema_extra={"enum": ["online"]}
    )
    store_url: str | None = Field(
        None,
        title="Store",
        description="Folder or URL (s3://, gs://, file://, memory://) that online training fills with the states it "
        "computes and reads from then on. Empty: nothing is stored.",
    )
    store_budget_gb: float | None = Field(
        None,
        gt=0.0,
        title="Store budget (GB)",
        description="Bytes that the store's samples may take; those past it go through the target every time. "
        "Empty: no limit.",
    )

    @model_validator(mode="after")
    def _check_budget(self) -> Online:
        if self.store_budget_gb is not None and self.store_url is None:
            raise ValueError(f"store_budget_gb={self.store_budget_gb} is of a store: set store_url, or leave it out")
        return self


class Offline(_Stored):
    """The target's hidden states are captured once into a Zarr store; training reads the store."""

    model_config = ConfigDict(frozen=True, title="Offline")

    mode: Literal["offline"] = Field(
        "offline", title="Mode", description="The tab that is open.", json_schema_extra={"enum": ["offline"]}
    )
    store_url: str = Field(
        "runs/store",
        title="Store",
        description="Folder or URL (s3://, gs://, file://, memory://) of the hidden-state store. Runs share it. "
        "Credentials come from the worker's environment.",
    )
    on_missing: Literal["capture", "refuse"] = Field(
        "capture",
        title="Missing samples",
        description="capture what the store lacks, or refuse the run and say what the store holds.",
    )
    prefetch_gb: float = Field(
        1.0, gt=0.0, title="Read ahead (GB)", description="Decoded states kept ready in memory while a step runs."
    )
    cache_dir: str | None = Field(
        None,
        title="Cache folder",
        description="Local folder that keeps shards of a remote store once read. Empty: no cache.",
    )
    cache_gb: float = Field(
        100.0,
        gt=0.0,
        title="Cache (GB)",
        description="Bytes the cache may hold; what is in stays, the rest is read anew.",
    )


class Auto(BaseModel):
    """The plan chooses: online, or offline with a preset, whatever takes the least time and fits. The choice is made
    once, after the data are prepared, and written into the run's config: a rerun takes the same one."""

    model_config = ConfigDict(frozen=True, title="Auto", json_schema_extra=mode_form)

    mode: Literal["auto"] = Field(
        "auto", title="Mode", description="The tab that is open.", json_schema_extra={"enum": ["auto"]}
    )
    store_url: str = Field(
        "runs/store",
        title="Store",
        description="Folder or URL (s3://, gs://, file://, memory://) where the store lies if the plan takes offline.",
    )
    preset: Preset = Field(
        "near",
        title="Least exact preset",
        description="The smallest store that the plan may choose; it takes the most exact one that fits.",
    )
    store_budget_gb: float | None = Field(
        None,
        gt=0.0,
        title="Store budget (GB)",
        description="Bytes that the run's samples may take in the store. Empty: nine tenths of what is free on a local "
        "disk, no limit at a URL.",
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_sibling_keys(cls, values: Any) -> Any:
        return _own_keys(cls, values)


HiddenStates = Annotated[Online | Offline | Auto, Field(discriminator="mode"), Tabs()]


def stored_encoding(states: Online | Offline | Auto) -> Encoding | None:
    """How the states that training reads are encoded; None when they come straight from the target, or the plan has yet
    to decide."""
    return None if isinstance(states, Auto) or states.store_url is None else states.encoding()


def _own_keys(cls: type[BaseModel], values: Any) -> Any:
    """Drop the sibling modes' keys, refuse all others that are not ours.

    Prefect's form leaks the keys of the tab that was open before into the value, so `extra="forbid"` would refuse a
    form filled correctly, and `extra="ignore"` would swallow a misspelt key.
    """
    if not isinstance(values, Mapping):
        return values
    siblings = {name for mode in modes().values() for name in mode.model_fields}
    for key in values:
        if key not in cls.model_fields and key not in siblings:
            raise ValueError(f"unknown key {key!r}{nearest(str(key), cls.model_fields)}")
    return {key: value for key, value in values.items() if key in cls.model_fields}


def modes() -> dict[str, type[BaseModel]]:
    """The hidden-state modes by name."""
    union = get_args(HiddenStates)[0]
    return {mode.model_fields["mode"].default: mode for mode in get_args(union)}


def nearest(key: str, names: Any) -> str:
    """`; did you mean 'x'?` for an unknown key, or the list of what there is."""
    close = difflib.get_close_matches(key, list(names), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(names)}"
