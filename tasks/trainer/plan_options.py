"""What a plan rests on, and what it says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from storage.presets import Encoding
from tasks.trainer.plan_data import DataRows
from tasks.trainer.plan_memory import Memory, Shape, TargetSize
from tasks.trainer.plan_storage import Bandwidth
from tasks.trainer.plan_time import Device


@dataclass(frozen=True, slots=True)
class Held:
    """What the store of this target holds already."""

    encoding: Encoding
    """How; others cannot be added beside it."""
    tokens: int
    """Committed tokens (of any run)."""
    bytes_per_token: float
    """Measured; 0 when it is empty."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a plan rests on."""

    data: DataRows
    """The data set's rows."""
    shape: Shape
    """The draft's."""
    target_config: Any
    """The target's transformers text config."""
    target: TargetSize
    """What it needs on the GPU."""
    target_active: int
    """Its parameters that one token goes through."""
    device: Device
    """What trains."""
    place: Bandwidth
    """Where the store lies, or would."""
    store_url: str
    """Its URL."""
    held: Held | None = None
    """None when there is no store of this target there."""


@dataclass(frozen=True, slots=True)
class StatesOption:
    """One way to have the target's states, with the recipe's own compute choices."""

    name: str
    """For people: online, or the preset with its soft targets."""
    mode: str
    """online or offline."""
    preset: str | None
    """Of offline."""
    last: str | None
    """Its soft targets: hidden or topk."""
    stored_bytes: int
    """Of the whole data set; 0 online."""
    memory: Memory
    """At the peak of a step."""
    capture_seconds: float
    """Before training."""
    wait_seconds: float
    """A step waits for its data, online for the target's forward."""
    step_seconds: float
    """A step, waiting included."""
    total_seconds: float
    """Capture and training."""
    problems: tuple[str, ...] = ()
    """Why it cannot be taken here; empty when it can."""


@dataclass(frozen=True, slots=True)
class ComputeOption:
    """The recipe with one compute choice changed."""

    name: str
    """`train` key and value; "as configured" for none."""
    peak_bytes: int
    """With the recommended way to have states."""
    step_seconds: float
    """A step without waiting."""
    fits: bool
    """In the device's memory."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything `eyas plan` says."""

    states: tuple[StatesOption, ...]
    compute: tuple[ComputeOption, ...]
    recommended: str
    """Name of a StatesOption."""
    recommendation: str
    """One sentence."""
    chosen: str
    """Name of the option that the run takes: its config's, or under mode auto the recommended one."""
    facts: dict[str, Any]
    """Device, data, bandwidth: what the figures rest on."""

    def option(self, name: str) -> StatesOption:
        """The way of that name."""
        return next(option for option in self.states if option.name == name)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        document = dataclasses.asdict(self)
        for option, made in zip(self.states, document["states"], strict=True):
            made["memory"]["peak"] = option.memory.peak
        return document
