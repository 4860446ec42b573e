"""Which night it is: one that was killed goes on, else a new one is planned, if there is something new.

The plan and the data that it names are on disk before anything is trained, so a night that is killed anywhere goes on
from the same data, whatever has arrived meanwhile; that is tomorrow's.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

from tasks.trainer.champion import History
from tasks.trainer.config import identity_fields
from tasks.trainer.config_nightly import NightlyConfig
from tasks.trainer.errors import InputError
from tasks.trainer.nightly.discover import (
    Found,
    choose,
    expand,
    ids_array,
    known,
    read_fixed,
    sort,
    write_night,
)
from tasks.trainer.nightly.home import FIXED, RECENT, SEEN, TRAIN, TRAINED, VALIDATION, Discovery, Home, Plan, Verdict
from tasks.trainer.target_text import load_text, pick_device

logger = logging.getLogger(__name__)

# What of the nightly group decides the data; the rest is about judging and keeping.
_OF_DATA = ("replay", "recent_heldout", "num_prompts", "first_steps")


def discover(config: NightlyConfig, home: Home) -> Discovery:
    """Continue the night that was killed, or plan one. The home must be held.

    Raises InputError for everything that is wrong with target, source or held-out set.
    """
    text = load_text(
        config.target.model,
        dtype=config.target.dtype,
        aux_layer_ids=config.target.aux_layer_ids,
        chat_template=config.target.chat_template,
        revision=config.target.revision,
        device=pick_device(config.train.device),
    )
    history = home.champion.history()
    identity = _identity(config)
    going_on = _unfinished(home, history, fingerprint=text.fingerprint, identity=identity)
    if going_on is not None:
        message = f"night {going_on.number} was not finished: it goes on"
        return Discovery(going_on, message, dict(going_on.counts))
    return _new_night(config, home, history, text.fingerprint, identity)


def _unfinished(home: Home, history: History, *, fingerprint: str, identity: str) -> Plan | None:
    """The night to go on with, always the newest. One that must not is given up, its conversations stay new."""
    numbers = home.numbers()
    if not numbers or home.verdict(numbers[-1]) is not None:
        return None
    plan = home.plan(numbers[-1])
    if history.of_night(plan.number) is not None:
        return plan  # promoted; what comes after is left to do
    reasons = []
    if plan.champion != history.champion:
        reasons.append(f"the champion was {plan.champion or 'none'} when it began, and is {history.champion} now")
    if plan.fingerprint != fingerprint:
        reasons.append("the target is another revision now")
    if plan.identity != identity:
        reasons.append("settings that decide the result were changed")
    if not reasons:
        return plan
    logger.warning("night %d is given up: %s", plan.number, "; ".join(reasons))
    home.write_verdict(Verdict(plan.number, "abandoned", tuple(reasons)))
    return None


def _new_night(config: NightlyConfig, home: Home, history: History, fingerprint: str, identity: str) -> Discovery:
    number = max(home.numbers(), default=0) + 1
    current = history.current
    before = known(home, history, fingerprint=fingerprint)
    fixed, fixed_prompts, fixed_digest = read_fixed(config, before)
    files = expand(config.data.source)
    found = sort(files, config, before, fixed_prompts)
    counts = _counts(files, found)
    too_few = _too_few(found, config)
    if too_few:
        return Discovery(None, too_few, counts)
    if len(found.validation) < 2:
        raise InputError(
            f"data.heldout_fraction={config.data.heldout_fraction} of {found.num_conversations} conversations leaves "
            f"{len(found.validation)} to choose the checkpoint by; raise it, or give more conversations"
        )
    night = home.night(number)
    chosen = choose(found, config, number=number)
    written, trained = write_night(night, files, config, chosen, fixed)
    if min(written.values()) == 0:
        raise InputError(f"data.source={config.data.source!r}: its conversations vanished while they were read")
    home.write_ids(number, SEEN, ids_array(found.new, width=16))
    home.write_ids(number, TRAINED, trained)
    plan = Plan(
        number=number,
        champion=history.champion,
        champion_digest=None if current is None else current.digest,
        fingerprint=fingerprint,
        new_target=current is not None and current.fingerprint != fingerprint,
        identity=identity,
        fixed_digest=fixed_digest,
        counts=counts
        | {
            "trained": written[TRAIN],
            "replayed": written[TRAIN] - len(found.fresh),
            "validation": written[VALIDATION],
            "judged_fixed": written[FIXED],
            "judged_recent": written[RECENT],
        },
    )
    home.write_plan(plan)
    return Discovery(plan, f"night {number}: {len(found.new)} new conversations", dict(plan.counts))


def _too_few(found: Found, config: NightlyConfig) -> str | None:
    """Why the night ends early, or None."""
    settings = config.nightly
    if not found.new:
        return f"nothing new: all {found.num_conversations} conversations were there before"
    if len(found.new) < settings.min_new:
        return (
            f"{len(found.new)} new conversations are fewer than nightly.min_new={settings.min_new}; they wait for the "
            "next night"
        )
    if len(found.recent) < settings.min_recent:
        return (
            f"{len(found.recent)} of the {len(found.new)} new conversations are held out, fewer than "
            f"nightly.min_recent={settings.min_recent}, and nothing could be judged on them; they wait for the next "
            "night"
        )
    if not found.fresh:
        return f"none of the {len(found.new)} new conversations may be trained on: all are held out"
    return None


def _counts(files: list[str], found: Found) -> dict[str, int]:
    return {
        "files": len(files),
        "conversations": found.num_conversations,
        "refused": found.refusals.total,
        "new": len(found.new),
        "fresh": len(found.fresh),
        "old": len(found.old),
        "recent": len(found.recent),
        "fixed_prompts_left_out": found.num_fixed_prompts,
        "learned_prompts_left_out": found.num_learned_prompts,
    }


def _identity(config: NightlyConfig) -> str:
    values: dict[str, Any] = identity_fields(config.run_config())
    values["nightly"] = {name: getattr(config.nightly, name) for name in _OF_DATA}
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()
