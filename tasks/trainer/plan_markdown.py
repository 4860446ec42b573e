"""The plan as markdown: the recommendation first, then the tables it rests on."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.trainer.durations import duration
from tasks.trainer.plan_options import Plan, StatesOption

GIB = 2**30


def render_plan(plan: Plan, *, target: str) -> str:
    """The whole plan."""
    facts = plan.facts
    decided = (
        f"`hidden_states.mode: auto` takes **{plan.chosen}**."
        if facts["mode"] == "auto"
        else f"This run is configured as **{plan.chosen}**."
    )
    parts = [
        f"# Plan for a draft of {target.rsplit('/', 1)[-1]}",
        f"**{plan.recommendation}** {decided}",
        "## Where the target's states come from",
        _states(plan),
        "Times are of the whole run: capture once, then every step. A step waits when reading takes longer than the "
        "step before; online, it waits for the target's forward.",
        "## What a step needs",
        _memory(plan),
        "## Other ways to compute it",
        _compute(plan),
        "## What this rests on",
        _facts(plan),
    ]
    return "\n\n".join(parts) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _states(plan: Plan) -> str:
    rows = []
    for option in plan.states:
        name = f"**{option.name}**" if option.name == plan.recommended else option.name
        if option.name == plan.chosen:
            name += " (this run)"
        rows.append([
            name,
            f"{option.stored_bytes / 1e9:,.2f} GB" if option.stored_bytes else "0",
            f"{option.memory.peak / GIB:.1f} GiB",
            duration(option.capture_seconds) if option.capture_seconds else "-",
            duration(option.step_seconds),
            f"{option.wait_seconds / option.step_seconds:.0%}",
            duration(option.total_seconds),
            "; ".join(option.problems) or "yes",
        ])  # fmt: skip
    return _table(["", "stored", "peak memory", "capture", "a step", "of it waiting", "in all", "fits"], rows)


def _memory(plan: Plan) -> str:
    shown: list[StatesOption] = [plan.option(plan.chosen)]
    if plan.recommended != plan.chosen:
        shown.append(plan.option(plan.recommended))
    parts = [
        ("draft", "the draft"),
        ("optimizer", "optimizer: masters, moments"),
        ("target_ends", "the target's embedding and head"),
        ("target", "the target, its forward"),
        ("states", "hidden states of packs"),
        ("activations", "activations"),
        ("step", "loss, or what the backward adds"),
        ("peak", "**peak**"),
    ]
    rows = [[title, *(f"{getattr(option.memory, part) / GIB:.2f} GiB" for option in shown)] for part, title in parts]
    rows.append(["the peak comes in the", *(option.memory.peak_at for option in shown)])
    return _table(["", *(option.name for option in shown)], rows)


def _compute(plan: Plan) -> str:
    rows = [
        [way.name, f"{way.peak_bytes / GIB:.1f} GiB", duration(way.step_seconds), "yes" if way.fits else "no"]
        for way in plan.compute
    ]
    return _table([f"`train`, with {plan.recommended}", "peak memory", "a step, without waiting", "fits"], rows)


def _facts(plan: Plan) -> str:
    facts, device, store, data = plan.facts, plan.facts["device"], plan.facts["store"], plan.facts["data"]
    source = "measured just now" if device["measured"] else "from the table of devices"
    free = "" if store["free"] is None else f", {store['free'] / 1e9:,.0f} GB free"
    held = f"; holds this target's states as {store['held']}" if store["held"] else ""
    choices = facts["choices"]
    rows = [
        ["device", f"{device['name']}, {device['memory'] / GIB:.1f} GiB: {device['products'] / 1e12:,.2f} TFLOP/s, "
                   f"copies {device['copy'] / 1e9:,.0f} GB/s ({source})"],
        ["store", f"`{store['url']}`: reads {store['read'] / 1e6:,.0f} MB/s, writes {store['write'] / 1e6:,.0f} MB/s"
                  f"{free}{held}"],
        ["data", f"{data['samples']:,} samples, {data['tokens']:,} tokens, {data['targets']:,} target rows "
                 f"({data['source']})"],
        ["run", f"{facts['steps']:,} steps of {choices['grad_accumulation']} pack(s) on {facts['ranks']} rank(s), "
                f"{data['epochs']:.1f} epochs"],
        ["computed as", f"attention {choices['attention']}, loss {choices['loss']}, checkpointing "
                        f"{choices['checkpointing']}, {choices['ttt_steps']} TTT steps, {choices['optimizer']}"],
    ]  # fmt: skip
    memory = "GPU memory and storage are" if device["kind"] == "cuda" else "Storage is"
    return _table(["", ""], rows) + (
        f"\n\n{memory} predicted to within a tenth (`eyas bench plan`); times are estimates to rank by. Memory is of "
        "one rank; what ranks say to one another, and packs shared by ranks, are left out."
    )
