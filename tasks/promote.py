"""The last nodes of a night: the gate, the promotion, and the report.

The event `draft.promoted` is sent after the pointer moved and before the night is over: it may come twice after a crash
between, with the same id, and is never lost.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from tasks.trainer.config_nightly import NightlyConfig
from tasks.trainer.nightly import settle
from tasks.trainer.nightly.home import Home, Plan, Verdict
from tasks.trainer.nightly.report import quiet_markdown

ARTIFACT = "nightly-report"


@task(name="promote", cache_policy=NO_CACHE)
def promote(config: NightlyConfig, home: Home, plan: Plan) -> Verdict:
    """Make tonight's draft the champion if the figures allow it; again is no harm."""
    verdict = settle.promote(config, home, plan)
    if verdict.entry is not None:
        entry = home.champion.history().entry(verdict.entry)
        emit_event(
            event="draft.promoted",
            resource={"prefect.resource.id": f"eyas.champion.{home.name}", "prefect.resource.name": home.place.url},
            payload={
                "url": home.champion.folder(entry).url,
                "champion": entry.number,
                "replaced": entry.replaced,
                "night": entry.night,
                "target": entry.target,
                "fingerprint": entry.fingerprint,
                "digest": entry.digest,
                "figures": dict(entry.figures),
            },
            id=uuid.uuid5(uuid.NAMESPACE_URL, f"{home.place.url}#{entry.number}"),
        )
    return verdict


@task(name="report-night", cache_policy=NO_CACHE)
def report_night(config: NightlyConfig, home: Home, plan: Plan, verdict: Verdict) -> None:
    """End the night; its artifact has one key for all nights, so that the UI shows the history."""
    markdown = settle.finish(config, home, plan, verdict)
    create_markdown_artifact(markdown, key=ARTIFACT, description=f"Night {plan.number} of {home.place.url}")


@task(name="report-quiet-night", cache_policy=NO_CACHE)
def report_quiet_night(config: NightlyConfig, home: Home, message: str, counts: Mapping[str, int]) -> None:
    """Say that there was nothing to do."""
    markdown = quiet_markdown(config, home, message, counts)
    create_markdown_artifact(markdown, key=ARTIFACT, description=f"No night of {home.place.url}")
