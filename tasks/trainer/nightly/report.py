"""The report of a night: what was new, what was judged, and why the draft was promoted or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.trainer.champion import History
from tasks.trainer.config_nightly import NightlyConfig
from tasks.trainer.nightly.home import Home, Plan, Verdict

_OUTCOMES = {
    "promoted": "**Promoted**: its draft is the champion now.",
    "not_promoted": "**Not promoted**: the champion stays.",
    "abandoned": "**Given up**: its conversations count as new again.",
}
_SETS = {
    "fixed": "fixed held-out set, champion",
    "recent": "recent held-out data, champion",
    "untrained": "all held-out data, the draft before training",
    "ngram": "all held-out data, n-gram lookup",
}


def night_markdown(config: NightlyConfig, home: Home, plan: Plan, verdict: Verdict, history: History) -> str:
    """The report. No text of a conversation is in it."""
    settings = config.nightly
    parts = [
        f"# Night {plan.number}",
        _OUTCOMES[verdict.outcome],
        "\n".join(f"* {reason}" for reason in verdict.reasons),
        "## What was new",
        _table(["", "conversations"], _new(plan)),
        f"Source `{config.data.source}`, files: {plan.counts['files']:,}. {_start(plan)}",
        "## What was judged",
    ]
    if verdict.figures:
        parts += [
            _table(
                ["on, against", "tau", "tau of the other", "difference", "at least", "by chance", "prompts"],
                [_row(name, found) for name, found in verdict.figures.items()],
            ),
            f"Chains of {config.evaluate.draft_tokens} greedy tokens; paired bootstrap over prompts, one-sided, "
            f"{1 - settings.significance:.0%} confidence; by chance: how often the difference is as large when the two "
            f"change places in each prompt at random. Promoted is what is lossless, on the fixed set not worse by "
            f"{settings.tolerance:.0%} of the champion's tau, and on recent data better.",
        ]
    else:
        parts.append("Nothing.")
    parts += ["## Champion", _champion(home, history), f"Run: `{home.run_url(plan.number)}`"]
    return "\n\n".join(parts) + "\n"


def quiet_markdown(config: NightlyConfig, home: Home, message: str, counts: Mapping[str, int]) -> str:
    """The report of a start that found nothing to do."""
    rows = [[name.replace("_", " "), f"{count:,}"] for name, count in counts.items()]
    parts = ["# No night", f"{message[0].upper()}{message[1:]}.", _table(["", ""], rows)]
    parts += ["## Champion", _champion(home, home.champion.history()), f"Source: `{config.data.source}`"]
    return "\n\n".join(parts) + "\n"


def _new(plan: Plan) -> list[list[str]]:
    counts = plan.counts
    rows = [
        ["in the source", counts["conversations"]],
        ["new since the last night", counts["new"]],
        ["new to the champion, trained on", counts["fresh"]],
        ["trained on before, replayed", counts["replayed"]],
        ["choose the checkpoint", counts["validation"]],
        ["judge: fixed held-out set", counts["judged_fixed"]],
        ["judge: recent", counts["judged_recent"]],
        ["left out, prompt in the fixed held-out set", counts["fixed_prompts_left_out"]],
        ["left out, prompt trained on before", counts["learned_prompts_left_out"]],
        ["refused", counts["refused"]],
    ]
    return [[str(name), f"{count:,}"] for name, count in rows]


def _start(plan: Plan) -> str:
    if plan.champion is None:
        return "There was no champion to start from."
    text = f"The draft started from champion {plan.champion} with its draft vocabulary."
    if plan.new_target:
        text += (
            f" The target is of a new revision (fingerprint `{plan.fingerprint}`): its states were captured anew, the "
            "champion was measured with it first, and every conversation is new to it."
        )
    return text


def _row(name: str, found: Mapping[str, Any]) -> list[str]:
    return [
        _SETS[name],
        f"{found['tau']:.3f}",
        f"{found['other']:.3f}",
        f"{found['tau'] - found['other']:+.3f}",
        f"{found['low']:+.3f}",
        f"{found['chance']:.2g}",
        f"{found['num_prompts']:,}",
    ]


def _champion(home: Home, history: History) -> str:
    entry = history.current
    if entry is None:
        return "None yet."
    folder = home.champion.folder(entry).url
    back = "" if entry.replaced is None else f" `eyas champion rollback {home.place.url}` goes back."
    return (
        f"Champion {entry.number}, of night {entry.night}, promoted {entry.promoted_at}, for `{entry.target}` "
        f"(fingerprint `{entry.fingerprint}`): `{folder}`.{back}"
    )


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
