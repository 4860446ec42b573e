"""The end of a night: the gate's word, the promotion, the report, and what is thrown away.

Everything here may be done twice: a night that is killed at any line of it does the rest at the next start. The one act
that counts is the swap of champion.json, and whether it was done is read from its history, never remembered.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from tasks.trainer.champion import Entry, History, write_keep_list
from tasks.trainer.config_nightly import NightlyConfig
from tasks.trainer.errors import InputError
from tasks.trainer.files import read_json
from tasks.trainer.nightly.gate import Decision, decide, judged_sets
from tasks.trainer.nightly.home import REPORT, Home, Plan, Verdict
from tasks.trainer.nightly.report import night_markdown
from tasks.trainer.run_dir import RunDir

logger = logging.getLogger(__name__)


def promote(config: NightlyConfig, home: Home, plan: Plan) -> Verdict:
    """Judge by the figures and move the pointer if they allow it. Returns the verdict, not yet written.

    Raises InputError when the run has no judgement, or another process holds the home by now.
    """
    champion = home.champion
    while True:
        history, version = champion.read()
        entry = history.of_night(plan.number)
        if entry is not None:
            return Verdict(plan.number, "promoted", entry.reasons, entry.figures, entry.number)
        if history.champion != plan.champion:
            why = f"the champion was {plan.champion or 'none'} when the night began, and is {history.champion} now"
            return Verdict(plan.number, "abandoned", (why,))
        # From its URL, if another machine trained it.
        run = RunDir.open(home.run_url(plan.number), config.scratch_dir)
        document = _judgement(run, plan)
        settings = config.evaluate
        decision = decide(judged_sets(document), config.nightly, samples=settings.bootstrap_samples, seed=settings.seed)
        if not decision.promote:
            return Verdict(plan.number, "not_promoted", decision.reasons, _figures(decision))
        assert home.lease is not None, "only who holds the home promotes"
        home.lease.check()
        champion.publish(run.draft, document["digest"])
        _keep(run, home, plan)
        if champion.promote(_entry(config, plan, history, document, decision), version=version, history=history):
            logger.info("night %d: its draft is the champion now", plan.number)


def finish(config: NightlyConfig, home: Home, plan: Plan, verdict: Verdict) -> str:
    """Write report and verdict, then drop what is kept no longer. Returns the report in Markdown."""
    history = home.champion.history()
    markdown = night_markdown(config, home, plan, verdict, history)
    home.night(plan.number).write_bytes(REPORT, markdown.encode())
    home.write_verdict(verdict)
    drop_old(home, history, keep=config.nightly.keep_nights)
    return markdown


def drop_old(home: Home, history: History, *, keep: int) -> list[int]:
    """Remove conversations and runs of nights that are over, but the newest `keep` and all that the history names.

    Returns the nights' numbers. From the newest on, until one was removed before: a home has many nights.
    """
    named = {entry.night for entry in history.entries}
    numbers = home.numbers()
    if numbers and home.verdict(numbers[-1]) is None:
        numbers.pop()
    dropped = []
    for number in reversed(numbers[: max(0, len(numbers) - keep)]):
        if number in named:
            continue
        if not home.has_text(number):
            break
        home.drop_text(number)
        dropped.append(number)
    return dropped


def _judgement(run: RunDir, plan: Plan) -> dict[str, Any]:
    try:
        document: dict[str, Any] = read_json(run.judgement)
    except (OSError, ValueError):
        raise InputError(f"{run.where(run.judgement)} is missing or damaged; run the night again") from None
    if (document["night"], document["champion"]) != (plan.number, plan.champion):
        raise InputError(f"{run.where(run.judgement)} is of another night; run the night again")
    return document


def _keep(run: RunDir, home: Home, plan: Plan) -> None:
    """Before the pointer moves: what the draft was trained on stays in the store."""
    from tasks.trainer.data.prepared import PreparedData

    captured, trained = run.receipt("capture"), run.receipt("train")
    store = captured or (trained or {}).get("store")
    if not store:
        return  # online, nothing was stored
    ids = [sample.sample_id for folder in (run.train_data, run.heldout_data) for sample in PreparedData.open(folder)]
    write_keep_list(
        store["store_url"], home=home.place, night=plan.number, fingerprint=store["fingerprint"], sample_ids=ids
    )


def _entry(
    config: NightlyConfig, plan: Plan, history: History, document: Mapping[str, Any], decision: Decision
) -> Entry:
    return Entry(
        number=max((entry.number for entry in history.entries), default=0) + 1,
        night=plan.number,
        digest=document["digest"],
        replaced=history.champion,
        promoted_at=datetime.now(UTC).isoformat(timespec="seconds"),
        target=config.target.model,
        fingerprint=plan.fingerprint,
        reasons=decision.reasons,
        figures=_figures(decision),
    )


def _figures(decision: Decision) -> dict[str, Any]:
    return {name: asdict(found) for name, found in decision.differences.items()}
