"""How a store encodes hidden states: every part by hand, or a preset by name.

The trade-off is bytes against the draft's quality. Hidden states cost 8 D bytes a token as bfloat16; a lossless codec
ends at two thirds of that, since sign and mantissa are noise. Steps of a channel's standard deviation go on from there:
each doubling of the step saves a bit a value. What the presets give and cost is measured (README.md); how the values
then lie in an array follows from step and codec (storage.forms).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from storage.codecs import CODEC_NAMES, LEVELS, CodecName
from storage.errors import StoreError

LastForm = Literal["hidden", "topk"]
LAST_FORMS: tuple[LastForm, ...] = get_args(LastForm)

DEFAULT_PRESET = "near"
_LARGEST_STEP = 8.0
_SMALLEST_STEP = 2.0**-10
_LARGEST_TOP_K = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How the states of one store are held. Part of StoreSpec: the samples of one store share it."""

    aux_step: float | None
    """Step of the auxiliary states' codes, in standard deviations of a channel; None: lossless, bfloat16 bits."""
    last: LastForm
    """What the soft target is made from: the target's last hidden state, or its k likeliest tokens."""
    last_step: float | None = None
    """As `aux_step`, for the last hidden state; None under "topk"."""
    top_k: int | None = None
    """k, for "topk"; None under "hidden"."""
    codec: CodecName = "zstd"
    """What compresses the chunks of states; see storage.codecs."""
    level: int = 1
    """The codec's level. Higher ones cost time and gain almost nothing on states; 0 for "raw"."""

    def __post_init__(self) -> None:
        for name in ("aux_step", "last_step"):
            step = getattr(self, name)
            if step is not None and not (math.isfinite(step) and _SMALLEST_STEP <= step <= _LARGEST_STEP):
                raise StoreError(
                    f"{name} {step} must lie in {_SMALLEST_STEP:g} to {_LARGEST_STEP:g} standard deviations, or be "
                    "left out for lossless"
                )
        if self.last not in LAST_FORMS:
            raise StoreError(f"last {self.last!r} is unknown; use one of {', '.join(LAST_FORMS)}")
        if self.last == "topk":
            if self.top_k is None or not 1 <= self.top_k <= _LARGEST_TOP_K:
                raise StoreError(f"top_k {self.top_k} must lie in 1 to {_LARGEST_TOP_K} when last is topk; try 256")
            if self.last_step is not None:
                raise StoreError(f"last_step {self.last_step} is for last=hidden; leave it out when last is topk")
        elif self.top_k is not None:
            raise StoreError(f"top_k {self.top_k} is for last=topk; leave it out when last is hidden")
        if self.codec not in CODEC_NAMES:
            raise StoreError(f"codec {self.codec!r} is unknown; use one of {', '.join(CODEC_NAMES)}")
        low, high = LEVELS[self.codec]
        if not low <= self.level <= high:
            raise StoreError(f"level {self.level} of codec {self.codec} must lie in {low} to {high}")

    @property
    def lossless(self) -> bool:
        """Whether every state comes back bit for bit."""
        return self.aux_step is None and self.last == "hidden" and self.last_step is None

    @property
    def needs_statistics(self) -> bool:
        """Whether anything is coded in steps, so that there are calibrated statistics, and exceptions."""
        return self.aux_step is not None or self.last_step is not None


PRESETS: Mapping[str, Encoding] = MappingProxyType(
    {
        "lossless": Encoding(aux_step=None, last="hidden"),
        "near": Encoding(aux_step=0.1, last="hidden", last_step=0.05),
        "compact": Encoding(aux_step=0.3, last="hidden", last_step=0.1),
        "small": Encoding(aux_step=0.5, last="topk", top_k=256),
        "tiny": Encoding(aux_step=0.8, last="topk", top_k=64),
    }
)
"""The encodings with a name, from the largest store to the smallest."""


def preset_name(encoding: Encoding) -> str:
    """The preset that `encoding` is, or "custom"."""
    return next((name for name, preset in PRESETS.items() if preset == encoding), "custom")


def encoding_of(fields: object) -> Encoding:
    """The encoding of such a mapping as `dataclasses.asdict` makes. StoreError for unknown, missing or wrong fields."""
    names = {field.name for field in dataclasses.fields(Encoding)}
    if not isinstance(fields, Mapping) or set(fields) != names:
        raise StoreError(f"an encoding has exactly the fields {', '.join(sorted(names))}")
    values: dict[str, Any] = dict(fields)
    for name in ("top_k", "level"):
        if values[name] is not None and type(values[name]) is not int:
            raise StoreError(f"{name} {values[name]!r} must be a whole number")
    for name in ("aux_step", "last_step"):
        if values[name] is not None and type(values[name]) not in (int, float):
            raise StoreError(f"{name} {values[name]!r} must be a number")
    return Encoding(**values)
