"""The plan of a run: what each choice would store, need on the GPU and take, and which one to take.

Every way to have the target's states (online; a store with each preset, its soft targets either way) and every choice
of checkpointing, attention and loss is predicted for the data at hand, on the device found or one from the table. The
predictions are arithmetic (plan_memory, plan_time, plan_storage), so a plan takes seconds; what they cannot know, they
measure: the device's rates, the store's bandwidth, and what the store already holds.

`hidden_states.mode: auto` takes the recommendation, once: it is written into the run's config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from storage.presets import PRESETS, Encoding, preset_name
from tasks.trainer.config import Auto, Offline, Online, RunConfig
from tasks.trainer.config_states import stored_encoding
from tasks.trainer.durations import duration
from tasks.trainer.plan_memory import Choices, Memory, PackRows, TargetSize, step_memory
from tasks.trainer.plan_options import ComputeOption, Facts, Plan, StatesOption
from tasks.trainer.plan_storage import codes_bytes, reading_seconds, stored_bytes, writing_seconds
from tasks.trainer.plan_time import step_seconds, target_seconds

# The allocator's blocks are rounded and leave gaps, and the CUDA context takes its part.
USABLE = 0.94
# A difference in time below this is none: the simpler, or the more exact, is taken.
_TIE = 0.05


def make_plan(config: RunConfig, facts: Facts) -> Plan:
    """Predict every choice, and recommend one."""
    choices = configured(config, facts)
    candidates = _candidates(config)
    options = [_states_option(config, facts, choices, *candidate) for candidate in candidates]
    allowed = [option for option in options if _is_exact_enough(config, option)]
    fitting = [option for option in allowed if not option.problems]
    best = _fastest(fitting or _with_least_trouble(allowed))
    own = _own_name(config)
    chosen = best.name if own is None else own
    compute = _compute_options(config, facts, choices, best)
    return Plan(
        states=tuple(options),
        compute=tuple(compute),
        recommended=best.name,
        recommendation=_sentence(config, facts, best, options, compute, is_feasible=bool(fitting)),
        chosen=chosen,
        facts=_document(config, facts, choices),
    )


def configured(config: RunConfig, facts: Facts) -> Choices:
    """The compute choices of the recipe on this device, "auto" resolved."""
    train, cuda = config.train, facts.device.kind == "cuda"
    half = train.dtype in ("auto", "bfloat16") and (cuda or train.dtype != "auto")
    return Choices(
        ttt_steps=train.ttt_steps,
        attention="fused" if train.attention == "auto" else train.attention,
        loss="linear" if train.loss == "auto" else train.loss,
        checkpointing=train.checkpointing,
        mlp_chunk_rows=train.mlp_chunk_rows,
        compiled=train.compile == "always" or (train.compile == "auto" and cuda),
        optimizer=train.optimizer,
        grad_accumulation=_packs_a_rank(config, facts),
        itemsize=2 if half else 4,
        shards=count_ranks(config, facts) if train.sharding == "fsdp" else 1,
    )


def count_ranks(config: RunConfig, facts: Facts) -> int:
    """Ranks that train; nproc auto is every GPU of the device found that has a pack in each optimizer step."""
    train = config.train
    if train.nproc != "auto":
        return train.nproc * train.nnodes
    return min(facts.device.count * train.nnodes, train.grad_accumulation * train.context_parallel)


def _packs_a_rank(config: RunConfig, facts: Facts) -> int:
    """Packs that a rank trains in each optimizer step: grad_accumulation counts those of all."""
    return -(-config.train.grad_accumulation * config.train.context_parallel // count_ranks(config, facts))


def decide(config: RunConfig, plan: Plan) -> Online | Offline:
    """What mode auto becomes."""
    states, option = config.hidden_states, plan.option(plan.chosen)
    assert isinstance(states, Auto)
    if option.mode == "online":
        return Online()
    return Offline.model_validate({"mode": "offline", "store_url": states.store_url, "preset": option.preset})


def _beside(config: RunConfig, facts: Facts) -> TargetSize:
    """The target of an online rank: with target.parallel=tensor its weights are spread over the ranks."""
    ranks = count_ranks(config, facts) if config.target.parallel == "tensor" else 1
    return dataclasses.replace(facts.target, weights=facts.target.weights // ranks)


# --- the ways to have states ----------------------------------------------------------------------------------------


def _candidates(config: RunConfig) -> list[tuple[str, Encoding | None]]:
    """(name, encoding): online, every preset with its soft targets both ways, and the recipe's own if it is none."""
    found: list[tuple[str, Encoding | None]] = [("online", None)]
    for preset in PRESETS:
        for last in ("hidden", "topk"):
            values = {"mode": "offline", "preset": preset, "last": last}
            if last == "topk" and not _takes_top_k(config):
                continue
            encoding = Offline.model_validate(values).encoding()
            found.append((_name(encoding), encoding))
    own = _own_name(config)
    if own is not None and own not in [name for name, _ in found]:
        found.append((own, stored_encoding(config.hidden_states)))
    return found


def _takes_top_k(config: RunConfig) -> bool:
    return config.train.loss in ("auto", "linear") and config.train.temperature == 1.0


def _name(encoding: Encoding) -> str:
    known = preset_name(encoding)
    if known != "custom":
        return f"offline {known}"
    for preset, other in PRESETS.items():
        if other.aux_step == encoding.aux_step and other.codec == encoding.codec:
            return f"offline {preset}, {_soft_target(encoding)}"
    step = "lossless" if encoding.aux_step is None else f"step {encoding.aux_step:g}"
    return f"offline {step}, {_soft_target(encoding)}"


def _soft_target(encoding: Encoding) -> str:
    if encoding.last == "topk":
        return f"top-{encoding.top_k}"
    return "last state" if encoding.last_step is None else f"last state {encoding.last_step:g}"


def _own_name(config: RunConfig) -> str | None:
    """The recipe's own way; None when the plan decides."""
    if isinstance(config.hidden_states, Auto):
        return None
    encoding = stored_encoding(config.hidden_states)
    return "online" if isinstance(config.hidden_states, Online) or encoding is None else _name(encoding)


def _states_option(
    config: RunConfig, facts: Facts, choices: Choices, name: str, encoding: Encoding | None
) -> StatesOption:
    online = encoding is None
    target = _beside(config, facts) if online else None
    pack, packs = facts.data.mean_pack, choices.grad_accumulation
    memory = _peak(facts, choices, encoding, target)
    compute = step_seconds(facts.shape, pack, choices, facts.device, kept=memory.activations)
    forward = target_seconds(facts.target_config, pack, facts.device, active_parameters=facts.target_active)
    stored, capture, wait = 0, 0.0, forward
    problems: list[str] = []
    if encoding is not None:
        stored = _stored(facts, encoding)
        raw = _raw(facts.shape.hidden_size, pack)
        share = pack.tokens / max(1, facts.data.tokens)
        reading = reading_seconds(encoding, facts.place, stored=stored * share, raw=raw, cores=facts.device.cores)
        wait = max(0.0, reading - compute)
        missing = 1.0
        if facts.held is not None and facts.held.encoding == encoding:
            missing = max(0.0, 1 - facts.held.tokens / max(1, facts.data.tokens))
        writing = writing_seconds(encoding, facts.place, stored=stored, raw=raw / share, cores=facts.device.cores)
        capture = missing * max(writing, forward / share)
        problems += _storage_problems(config, facts, encoding, stored * missing)
    if memory.peak > USABLE * facts.device.memory:
        problems.append(f"needs {memory.peak / 2**30:.1f} GiB of {facts.device.memory / 2**30:.1f}")
    step = packs * (compute + wait)
    return StatesOption(
        name=name,
        mode="online" if online else "offline",
        preset=None if encoding is None else _preset_of(encoding),
        last=None if encoding is None else encoding.last,
        stored_bytes=stored,
        memory=memory,
        capture_seconds=capture,
        wait_seconds=packs * wait,
        step_seconds=step,
        total_seconds=capture + config.train.steps * step,
        problems=tuple(problems),
    )


def _preset_of(encoding: Encoding) -> str | None:
    known = preset_name(encoding)
    return None if known == "custom" else known


def _peak(facts: Facts, choices: Choices, encoding: Encoding | None, target: TargetSize | None) -> Memory:
    """The peak of the pack that needs most."""
    size = facts.shape.hidden_size

    def of(pack: PackRows) -> Memory:
        stored = 0
        if encoding is not None:
            stored = codes_bytes(encoding, hidden_size=size, tokens=pack.tokens, targets=pack.targets)
        top_k = None if encoding is None else encoding.top_k
        return step_memory(facts.shape, pack, choices, top_k=top_k, stored=stored, target=target)

    return max((of(pack) for pack in facts.data.largest_packs()), key=lambda memory: memory.peak)


def _stored(facts: Facts, encoding: Encoding) -> int:
    data = facts.data
    if facts.held is not None and facts.held.encoding == encoding and facts.held.bytes_per_token:
        return round(facts.held.bytes_per_token * data.tokens)
    return stored_bytes(
        encoding,
        hidden_size=facts.shape.hidden_size,
        tokens=data.tokens,
        targets=data.targets,
        samples=data.samples,
    )


def _raw(hidden_size: int, pack: PackRows) -> float:
    return 2.0 * hidden_size * (3 * pack.tokens + pack.targets)


def _storage_problems(config: RunConfig, facts: Facts, encoding: Encoding, adding: float) -> list[str]:
    problems = []
    if facts.held is not None and facts.held.encoding != encoding:
        problems.append(f"{facts.store_url} holds this target's states as {_name(facts.held.encoding)[8:]}")
    budget = config.hidden_states.store_budget_gb if isinstance(config.hidden_states, Auto) else None
    room = budget * 1e9 if budget is not None else None if facts.place.free is None else 0.9 * facts.place.free
    if room is not None and adding > room:
        problems.append(f"would add {adding / 1e9:,.1f} GB where {room / 1e9:,.1f} may be used")
    return problems


# --- which one -------------------------------------------------------------------------------------------------------


def _is_exact_enough(config: RunConfig, option: StatesOption) -> bool:
    """Whether the recommendation may be this: online, or a named preset that loses no more than was allowed."""
    if option.mode == "online":
        return True
    states = config.hidden_states
    least = states.preset if isinstance(states, Auto | Offline) else "near"
    order = list(PRESETS)
    return option.preset is not None and order.index(option.preset) <= order.index(least)


def _fastest(options: Sequence[StatesOption]) -> StatesOption:
    """The least time; among those as good, the first: online, then the most exact store."""
    least = min(option.total_seconds for option in options)
    return next(option for option in options if option.total_seconds <= (1 + _TIE) * least)


def _with_least_trouble(options: Sequence[StatesOption]) -> list[StatesOption]:
    """When nothing fits: what can be stored and needs the least memory."""
    few = min(len(option.problems) for option in options)
    return [min((o for o in options if len(o.problems) == few), key=lambda option: option.memory.peak)]


def _compute_options(config: RunConfig, facts: Facts, choices: Choices, best: StatesOption) -> list[ComputeOption]:
    """The recipe with each compute choice changed, one at a time."""
    changes: list[dict[str, Any]] = [{}]
    changes += [{"checkpointing": value} for value in ("none", "mlp", "step")]
    changes += [{"attention": value} for value in ("fused", "flex", "eager")]
    top_k = best.last == "topk"
    changes += [{"loss": value} for value in (("linear",) if top_k else ("linear", "triton", "torch"))]
    encoding = None if best.mode == "online" else PRESETS[best.preset or "near"]
    target = _beside(config, facts) if best.mode == "online" else None
    found = []
    for change in changes:
        ((key, value),) = change.items() if change else (("", ""),)
        if change and getattr(choices, key) == value:
            continue
        changed = dataclasses.replace(choices, **change)
        memory = _peak(facts, changed, encoding, target)
        seconds = step_seconds(facts.shape, facts.data.mean_pack, changed, facts.device, kept=memory.activations)
        found.append(
            ComputeOption(
                name=f"{key}={value}" if change else "as configured",
                peak_bytes=memory.peak,
                step_seconds=changed.grad_accumulation * seconds,
                fits=memory.peak <= USABLE * facts.device.memory,
            )
        )
    return found


def _sentence(
    config: RunConfig,
    facts: Facts,
    best: StatesOption,
    options: Sequence[StatesOption],
    compute: Sequence[ComputeOption],
    *,
    is_feasible: bool,
) -> str:
    """The recommendation."""
    where = facts.device.name
    needs = f"{best.memory.peak / 2**30:.1f} of {facts.device.memory / 2**30:.1f} GiB on {where}"
    if not is_feasible:
        ways = [way for way in compute if way.fits and way.name.startswith("checkpointing=")]
        if ways and len(best.problems) == 1:
            way = min(ways, key=lambda way: way.step_seconds)
            return (
                f"Nothing fits as configured: take {best.name} with train.{way.name}, "
                f"{way.peak_bytes / 2**30:.1f} GiB and {duration(way.step_seconds)} a step."
            )
        return (
            f"Nothing fits: {best.name} comes closest, but {'; '.join(best.problems)}. Use a smaller "
            "train.pack_tokens, another store or a larger GPU."
        )
    stored = f", {best.stored_bytes / 1e9:,.1f} GB stored" if best.stored_bytes else ", nothing stored"
    others = [option for option in options if option.mode != best.mode]
    against = min(others, key=lambda option: (bool(option.problems), option.total_seconds))
    text = f"Take {best.name}: {duration(best.total_seconds)} in all{stored}, {needs}"
    if against.problems:
        return f"{text}; {against.name} does not fit: {against.problems[0]}."
    return f"{text}; {against.name} would take {duration(against.total_seconds)}."


def _document(config: RunConfig, facts: Facts, choices: Choices) -> dict[str, Any]:
    data, device = facts.data, facts.device
    return {
        "device": dataclasses.asdict(device),
        "store": {"url": facts.store_url, **dataclasses.asdict(facts.place),
                  "held": None if facts.held is None else _name(facts.held.encoding)},
        "data": {"samples": data.samples, "tokens": data.tokens, "targets": data.targets,
                 "packs_an_epoch": data.packs_an_epoch, "source": data.source,
                 "epochs": config.train.steps * config.train.grad_accumulation / data.packs_an_epoch},
        "choices": dataclasses.asdict(choices),
        "ranks": count_ranks(config, facts),
        "steps": config.train.steps,
        "mode": config.hidden_states.mode,
    }  # fmt: skip
