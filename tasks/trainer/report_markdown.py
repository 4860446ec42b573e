"""The report as markdown: the answer first, then what it rests on."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from tasks.trainer.config import RunConfig
from tasks.trainer.export.commands import serving_commands
from tasks.trainer.report_plan import comparison_cells
from tasks.trainer.report_plots import PLOTS


def render(facts: dict[str, Any], config: RunConfig) -> str:
    """The whole report; plots are linked as plots/NAME.png beside it."""
    parts = [
        f"# Draft for {config.target.model.rsplit('/', 1)[-1]}",
        _verdict(facts),
        f"![tau]({_plot('tau')})",
        _acceptance(facts),
        f"![depth]({_plot('depth')})",
        *_domains(facts),
        *_contexts(facts),
        "## Serve it",
        serving_commands(
            target=config.target.model,
            draft=(facts["export"] or {}).get("folder", "DRAFT"),
            draft_tokens=facts["acceptance"]["num_draft_tokens"],
            layout=config.train.export_layout,
        ),
        "## Training",
        f"![training]({_plot('training')})",
        _training(facts, config),
        "## Data",
        _data(facts),
        "## Hidden states",
        _storage(facts),
        *_against_plan(facts),
        "## Lineage",
        _places(facts, config),
    ]
    return "\n\n".join(parts) + "\n"


def depth_table(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """What each draft depth is worth, a row a depth, for a table that can be searched; None where not measured."""
    acceptance = facts["acceptance"]
    columns = {
        "accepted": acceptance["acceptance"],
        "accepted, n-gram lookup": acceptance["acceptance_ngram"],
        "accepted before training": acceptance["acceptance_untrained"],
        "acc, teacher-forced": facts["acc"],
        "alpha, teacher-forced": facts["alpha"],
    }
    depths = max(len(values) for values in columns.values())
    return [
        {
            "depth": depth,
            **{name: round(values[depth], 4) if depth < len(values) else None for name, values in columns.items()},
        }
        for depth in range(depths)
    ]


def with_embedded_plots(path: Path) -> str:
    """The report with its plots as data URIs: a Prefect artifact cannot read the run directory."""

    def embed(match: re.Match[str]) -> str:
        content = base64.b64encode((path.parent / match[2]).read_bytes()).decode()
        return f"![{match[1]}](data:image/png;base64,{content})"

    return re.sub(r"!\[(\w+)\]\((plots/[\w.]+)\)", embed, path.read_text(encoding="utf-8"))


def _plot(name: str) -> str:
    return f"plots/{PLOTS[name]}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _verdict(facts: dict[str, Any]) -> str:
    acceptance = facts["acceptance"]
    low, high = facts["tau_interval"]
    ngram_low, ngram_high = acceptance["tau_minus_ngram_interval"]
    better = "better than" if ngram_low > 0 else "worse than" if ngram_high < 0 else "not told apart from"
    check = {
        "generate": "every answer equals `transformers.generate` token for token",
        "rescored": f"every token lies within {acceptance['tie_margin']} of its row's maximum logit "
        f"({acceptance['num_not_argmax']} of {acceptance['num_tokens']} are not the exact argmax)",
        "statistical": "sampled tokens are not told apart from the target's "
        f"(p-values {_p(acceptance['p_likelihood'])} and {_p(acceptance['p_favoured'])})",
    }[acceptance["lossless_check"]]
    failed = (
        f"p-values {_p(acceptance['p_likelihood'])} and {_p(acceptance['p_favoured'])}"
        if acceptance["lossless_check"] == "statistical"
        else f"prompts {acceptance['lossy_prompts']} failed the check"
    )
    lossless = f"lossless: {check}" if facts["lossless"] else f"**NOT lossless**: {failed}"
    return (
        f"The draft emits **{facts['tau']:.3f} tokens per target forward** (tau; 95% interval {low:.3f} to {high:.3f}; "
        f"{drafted(acceptance)}), {better} n-gram lookup ({facts['tau_ngram']:.3f}) on the "
        f"same answers; before training it was {facts['tau_untrained']:.3f}. Decoding was {lossless}."
    )


def drafted(acceptance: dict[str, Any]) -> str:
    """How the draft was measured, in words."""
    sampling = (
        f"temperature {acceptance['temperature']:g}, {acceptance['candidates']} candidates"
        if acceptance["temperature"]
        else "greedy"
    )
    if acceptance["drafting"] == "chain":
        return f"{sampling}, chain of {acceptance['num_draft_tokens']}"
    return (
        f"{sampling}, tree of {acceptance['tree_tokens']} tokens, {acceptance['num_draft_tokens']} deep, "
        f"{acceptance['tree_top_k']} wide"
    )


def _p(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _acceptance(facts: dict[str, Any]) -> str:
    acceptance = facts["acceptance"]
    depths = max(len(acceptance["acceptance"]), len(facts["acc"]))
    header = ["", *(f"depth {depth}" for depth in range(depths))]

    def row(name: str, values: list[float]) -> list[str]:
        return [name, *(f"{value:.3f}" for value in values), *([""] * (depths - len(values)))]

    rows = [
        row("accepted, this draft", acceptance["acceptance"]),
        row("accepted, n-gram lookup", acceptance["acceptance_ngram"]),
        row("accepted before training", acceptance["acceptance_untrained"]),
        row("acc, teacher-forced", facts["acc"]),
        row("alpha, teacher-forced", facts["alpha"]),
    ]
    ngram, untrained = acceptance["tau_minus_ngram_interval"], acceptance["tau_minus_untrained_interval"]
    return "\n\n".join([
        _table(header, rows),
        f"{acceptance['num_prompts']} prompts, {acceptance['num_tokens']} tokens emitted, "
        f"{acceptance['num_tokens_counted']} counted: the {acceptance['loop_share']:.0%} after an answer's first "
        "repeated 8-gram are left out, for loops are free. Accepted counts proposals whose predecessors were accepted; "
        "n-gram lookup proposes only where the last tokens occurred before. Paired 95% intervals of tau: over n-gram "
        f"lookup {ngram[0]:+.3f} to {ngram[1]:+.3f}, over the draft before training {untrained[0]:+.3f} to "
        f"{untrained[1]:+.3f}. Target computed in {facts['evaluation']['dtype']}; "
        f"{acceptance['speculative_seconds']:.0f} s with the draft, {acceptance['plain_seconds']:.0f} s by "
        f"`transformers.generate`, in batches of {acceptance['batch_size']}: {acceptance['speed_up']:.2f} x as fast; "
        f"the ceiling, all tokens over all forwards, is {acceptance['speed_up_ceiling']:.2f} (Python loops: no serving "
        "speed).",
    ])  # fmt: skip


def _domains(facts: dict[str, Any]) -> list[str]:
    """Acceptance by domain; nothing where the prompts are of one."""
    domains = facts["acceptance"].get("domains", [])
    if not domains:
        return []
    rows = [
        [
            domain["name"],
            f"{domain['prompts']:,}",
            f"**{domain['tau']:.3f}**",
            "-" if domain["tau_interval"] is None else "{:.2f} to {:.2f}".format(*domain["tau_interval"]),
            f"{domain['tau_ngram']:.3f}",
            " ".join(f"{value:.2f}" for value in domain["acceptance"]),
        ]
        for domain in domains
    ]
    header = ["domain", "prompts", "tau", "95% interval", "n-gram lookup", "accepted by depth"]
    return ["### By domain", _table(header, rows)]


def _contexts(facts: dict[str, Any]) -> list[str]:
    """Acceptance by context length; nothing where all are of one range."""
    acceptance = facts["acceptance"]
    measured = [(f"{one['from']:,} to {one['to'] - 1:,}", one) for one in acceptance["contexts"]]
    measured = measured if len(measured) > 1 else []
    measured += [(f"{one['context']:,}, led up to", one) for one in acceptance["lengthened"]]
    if not measured:
        return []
    rows = [
        [
            name,
            f"{one['prompts']:,}",
            f"**{one['tau']:.3f}**",
            "-" if one["tau_interval"] is None else "{:.2f} to {:.2f}".format(*one["tau_interval"]),
            " ".join(f"{value:.2f}" for value in one["acceptance"]),
        ]
        for name, one in measured
    ]
    return [
        "### By context length",
        _table(["tokens before a round", "prompts", "tau", "95% interval", "accepted"], rows),
    ]


def _against_plan(facts: dict[str, Any]) -> list[str]:
    rows = facts["against_plan"]
    if not rows:
        return []
    plan = facts["plan"]
    asked = (
        "`hidden_states.mode: auto` took it" if plan["asked"] == "auto" else f"recommended was {plan['recommended']}"
    )
    return [
        "## Against the plan",
        f"Planned for {plan['device']} as {plan['chosen']}; {asked}.",
        _table(["", "predicted", "measured", "off by"], comparison_cells(rows)),
    ]


def _training(facts: dict[str, Any], config: RunConfig) -> str:
    trained = facts["train"]
    rate = facts["tokens"] / facts["train_seconds"] if facts["train_seconds"] else 0.0
    rows = [
        ["mode", facts["mode"]],
        ["steps", f"{len(facts['losses']):,} optimizer steps, {config.train.ttt_steps} TTT steps"],
        ["tokens", f"{facts['tokens']:,} ({rate:,.0f} tokens/s, {facts['train_seconds']:,.0f} s)"],
        ["waiting for data", _waiting(facts)],
        ["loss", f"{facts['losses'][0]:.3f} to {facts['losses'][-1]:.3f}"],
        ["held out", _held_out(facts)],
        ["attention, loss", f"{trained['attention']}, {trained['loss']}"],
        ["device, dtype", f"{trained['device']}, {trained['dtype']} with float32 masters"],
    ]
    if (kept := trained.get("head_rows_of_parent")) is not None:
        size = facts["prepare"]["vocabulary_size"]
        rows.insert(1, ["started from", f"`{config.draft.init}`; {kept:,} of {size:,} head rows are its"])
    return _table(["", ""], rows)


def _held_out(facts: dict[str, Any]) -> str:
    looks = facts["heldout_curve"]
    exported = f"step {facts['evaluation']['step']} is measured and exported"
    if not looks:
        return f"not looked at while training; {exported}"
    taus = [(look["tau"], look["step"]) for look in looks if look["tau"] is not None]
    best = max(taus, key=lambda pair: (pair[0], -pair[1])) if taus else None
    simulated = f", simulated tau {best[0]:.3f} at step {best[1]}" if best else ""
    return f"loss {looks[0]['loss']:.3f} to {looks[-1]['loss']:.3f} in {len(looks)} looks{simulated}; {exported}"


def _waiting(facts: dict[str, Any]) -> str:
    share = facts["data_wait_seconds"] / facts["train_seconds"] if facts["train_seconds"] else 0.0
    moved, raw = facts["train"]["h2d_bytes"], facts["train"]["h2d_bytes_bf16"]
    codes = f"; {moved / raw:.0%} of the bytes of bfloat16 went to the device" if raw else ""
    return f"{share:.1%} of the steps' time{codes}"


def _data(facts: dict[str, Any]) -> str:
    prepared = facts["prepare"]
    rows = [
        [name, f"{part['samples']:,}", f"{part['tokens']:,}", f"{part['supervised']:,}"]
        for name, part in (("training", prepared["train"]), ("held out", prepared["heldout"]))
    ]
    text = [_table(["", "samples", "tokens", "supervised"], rows)]
    domains = prepared.get("domains", {})
    if len(domains) > 1:
        text.append("Trained on: " + ", ".join(f"{name} {count:,}" for name, count in domains.items()) + " samples.")
    counts = {reason: count for reason, count in prepared["refused"].items() if count}
    refused = ", ".join(f"{reason.replace('_', ' ')} {count}" for reason, count in counts.items())
    text.append(
        f"Cut or refused: {refused or 'none'}. Supervised tokens lost by cutting: {prepared['supervised_cut']:,}."
    )
    text.append(_packs(prepared["packs"]))
    text.append(
        f"Draft vocabulary: {prepared['vocabulary_size']:,} of {prepared['target_vocab_size']:,} tokens, "
        f"{prepared['coverage']:.1%} of the supervised tokens."
    )
    if prepared["regenerated"]:
        text.append(f"Answers were regenerated by the target ({prepared['regenerated']:,} conversations).")
    return "\n\n".join(text)


def _packs(packs: dict[str, Any]) -> str:
    text = (
        f"An epoch is {packs['packs']:,} packs of up to {packs['pack_tokens']:,} tokens, {packs['unfilled']:.1%} of "
        "their room empty"
    )
    if packs["alone"]:
        text += f"; {packs['alone']:,} documents are longer and train alone, the longest {packs['longest']:,} tokens"
    return f"{text}."


def _storage(facts: dict[str, Any]) -> str:
    raw, stored, store = facts["raw_bytes_per_token"], facts["stored_bytes_per_token"], facts["store"]
    if not store:
        return f"Online: nothing stored. As raw bfloat16 the states would take {raw:,.0f} bytes a token."
    text = (
        f"Store `{store['store_url']}`, fingerprint `{store['fingerprint']}`, preset `{store['preset']}`: "
        f"{store['store_samples']:,} samples, {store['store_tokens']:,} tokens, {store['stored_bytes'] / 1e6:,.1f} MB"
    )
    if stored:
        text += f". **{stored:,.0f} bytes a token** against {raw:,.0f} as raw bfloat16 ({raw / stored:.2f} x smaller)"
    return f"{text}. In this run {store['captured_samples']:,} samples went through the target for it."


def _places(facts: dict[str, Any], config: RunConfig) -> str:
    export = facts["export"] or {}
    rows = [
        ["draft (SGLang and vLLM layout)", f"`{export.get('folder', '')}`"],
        ["conversations", f"`{config.data.source}`"],
        ["config, resolved", f"`{facts['run_dir']}/config.yaml`"],
        ["metrics, one line a step", f"`{facts['run_dir']}/metrics.jsonl`"],
        ["checkpoints", f"`{facts['run_dir']}/checkpoints`"],
        ["fingerprint of the target", f"`{facts['prepare']['fingerprint']}`"],
        ["data hash", f"`{facts['prepare']['data_hash']}`"],
        ["run identity", f"`{facts['train']['identity']}`"],
        ["Eyas's commit", f"`{facts['commit']}`" if facts["commit"] else "not a checkout"],
        ["versions", ", ".join(f"{name} {number}" for name, number in facts["versions"].items())],
    ]
    return _table(["", ""], rows)
