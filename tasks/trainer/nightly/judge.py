"""Measuring for the gate: tonight's draft and the champion on the same answers, prompt by prompt.

Tonight's draft decodes with the target; the champion (on a first night: n-gram lookup and the draft before training)
is replayed on the answers that came out, which is exact (acceptance/decode.py) and pairs the two without noise of
another decode. Both are read from the folders that would be served. Besides the export's rounding this measures the
very files that the pointer will name.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from storage.location import Location
from tasks.trainer.acceptance.decode import Proposer, decode, replay, verify_lossless
from tasks.trainer.acceptance.drafter import Drafter
from tasks.trainer.acceptance.ngram import NgramLookup
from tasks.trainer.acceptance.statistics import PromptCounts, bootstrap_tau, count_rounds, loop_start, tau
from tasks.trainer.config import RunConfig
from tasks.trainer.data.mask import ChatRenderer, RefusedConversationError
from tasks.trainer.data.prepared import prompt_id
from tasks.trainer.data.read import Conversation, read_conversations
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.draft.shape import fresh_draft
from tasks.trainer.errors import InputError
from tasks.trainer.export.folder import load_exported
from tasks.trainer.files import write_json
from tasks.trainer.nightly.gate import JudgedSet
from tasks.trainer.nightly.home import FIXED, RECENT, night_of
from tasks.trainer.parent import parent_digest
from tasks.trainer.progress import Progress
from tasks.trainer.run_dir import RunDir
from tasks.trainer.target import Target
from tasks.trainer.target_ends import load_ends
from tasks.trainer.target_text import TargetText, pick_device
from tasks.trainer.train import checkpoint

logger = logging.getLogger(__name__)

Prompts = Sequence[npt.NDArray[np.int32]]
SETS = {"fixed": FIXED, "recent": RECENT}


def judge_draft(config: RunConfig, run: RunDir, progress: Progress) -> dict[str, Any]:
    """Measure the exported draft of a night's run against what it must beat; writes judgement.json.

    Returns the receipt. Raises InputError when the run is no night's, has no exported draft, or nothing can be judged.
    """
    home, plan = night_of(run.url)
    target = _target(config)
    draft = _served(run.draft, target)
    rivals: dict[str, Callable[[list[int]], Proposer]] = {"ngram": lambda first: NgramLookup(first)}
    if plan.champion is None:
        untrained = _untrained(config, run, target)
        rivals["untrained"] = lambda _: Drafter(untrained)
    else:
        # The run started from the champion's folder on this machine, whose content was checked.
        assert config.draft.init is not None, "a night with a champion starts from it"
        champion = _served(Path(config.draft.init), target)
        rivals["champion"] = lambda _: Drafter(champion)
    prompts = {name: read_prompts(home.night(plan.number), file, config, target) for name, file in SETS.items()}
    total = sum(map(len, prompts.values()))
    sets, before = {}, 0
    for name, chosen in prompts.items():
        sets[name] = measure(target, draft, rivals, chosen, config, partial(_shown, progress, before, total))
        before += len(chosen)
    digest = parent_digest(str(run.draft))
    document = {
        "digest": digest,
        "night": plan.number,
        "champion": plan.champion,
        "fingerprint": target.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "sets": {name: asdict(judged) for name, judged in sets.items()},
    }
    write_json(run.judgement, document)
    return {
        "digest": digest,
        **{f"{name}_prompts": judged.num_prompts for name, judged in sets.items()},
        "lossy": sum(judged.num_lossy for judged in sets.values()),
    }


def measure_champion(config: RunConfig, run: RunDir, progress: Progress) -> dict[str, Any]:
    """What the champion is worth with tonight's target, on the fixed held-out set. Returns the receipt."""
    home, plan = night_of(run.url)
    assert plan.champion is not None
    assert config.draft.init is not None, "a night with a champion starts from it"
    target = _target(config)
    prompts = read_prompts(home.night(plan.number), FIXED, config, target)
    champion = _served(Path(config.draft.init), target)
    judged = measure(target, champion, {}, prompts, config, partial(_shown, progress, 0, len(prompts)))
    counts = judged.counts["draft"]
    if len(counts) < 2:
        raise InputError(f"only {len(counts)} of {len(prompts)} fixed held-out prompts have an answer to count")
    low, high = bootstrap_tau(counts, samples=config.evaluate.bootstrap_samples, seed=config.evaluate.seed)
    return {
        "champion": plan.champion,
        "fingerprint": target.fingerprint,
        "fixed_digest": plan.fixed_digest,
        "tau": tau(counts),
        "tau_interval": [low, high],
        "prompts": judged.num_prompts,
    }


def measure(
    target: Target,
    draft: Eagle3Draft,
    rivals: Mapping[str, Callable[[list[int]], Proposer]],
    prompts: Prompts,
    config: RunConfig,
    progress: Callable[[int], None],
) -> JudgedSet:
    """Decode each prompt with the draft, check the answer against the target alone, and replay the rivals on it.

    rivals: by name, makes a proposer for a prompt of which it gets the first token. An answer without a token to count
    (one token, or a loop from its start) counts for nobody.
    """
    settings = config.evaluate
    limits = {"num_draft_tokens": settings.draft_tokens, "max_new_tokens": settings.max_new_tokens}
    counts: dict[str, list[PromptCounts]] = {name: [] for name in ("draft", *rivals)}
    num_lossy = 0
    for done, token_ids in enumerate(prompts, start=1):
        prompt = torch.from_numpy(token_ids.astype(np.int64))
        decoded = decode(target, prompt, Drafter(draft), **limits)
        check = verify_lossless(
            target,
            prompt,
            decoded.answer,
            max_new_tokens=settings.max_new_tokens,
            tie_margin=settings.tie_margin,
        )
        num_lossy += not check.lossless
        cut = loop_start(decoded.answer)
        if cut > 1 and decoded.rounds:
            rounds = {"draft": decoded.rounds}
            for name, make in rivals.items():
                rounds[name] = replay(decoded, make(prompt[:1].tolist()), **limits)
            for name, taken in rounds.items():
                counts[name].append(count_rounds(taken, cut=cut, num_draft_tokens=settings.draft_tokens))
        progress(done)
    return JudgedSet(counts, len(prompts), num_lossy)


def read_prompts(
    night: Location, name: str, config: RunConfig, target: Target | TargetText
) -> list[npt.NDArray[np.int32]]:
    """The prompts of a night's file, int32 [P] each, as the target would be asked: everything before the first answer.

    Those that the template does not take, or that do not fit the target's positions or data.max_tokens, are left out
    with a warning. Raises InputError when none is left.
    """
    renderer = ChatRenderer(
        target.tokenizer, target.eos_token_ids, template_arguments={"date_string": config.data.date_string}
    )
    longest = getattr(target.config, "max_position_embeddings", None) or config.data.max_tokens
    limit = min(longest - config.evaluate.max_new_tokens, config.data.max_tokens)
    conversations, _ = read_conversations([f"{night.url}/{name}"], on_error=config.data.on_error)
    prompts = []
    for conversation in sorted(conversations, key=prompt_id):
        ids = _prompt_ids(renderer, conversation)
        if 0 < len(ids) <= limit:
            prompts.append(np.array(ids, dtype=np.int32))
    if len(prompts) < len(conversations):
        logger.warning(
            "%s: %d of %d prompts left out: the template does not take them, or they are over %d tokens",
            name, len(conversations) - len(prompts), len(conversations), limit,
        )  # fmt: skip
    if not prompts:
        raise InputError(f"{night.url}/{name}: no prompt fits {limit} tokens; raise data.max_tokens")
    return prompts


def _shown(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total, "prompts judged")


def _prompt_ids(renderer: ChatRenderer, conversation: Conversation) -> list[int]:
    """Empty when the template does not take it, or it begins with an answer."""
    asked = list(itertools.takewhile(lambda message: message.role != "assistant", conversation.messages))
    try:
        if asked:
            return renderer.prompt_ids(asked, conversation.tools)
        if conversation.messages:
            return []
        # Preformatted text, or tokens with their mask.
        token_ids, loss_mask = renderer.rows(conversation)[0]
    except RefusedConversationError:
        return []
    ids: list[int] = token_ids[: int(np.argmax(loss_mask))].tolist()
    return ids


def _target(config: RunConfig) -> Target:
    return Target.of(config.target, device=pick_device(config.train.device), compute_dtype=config.evaluate.dtype)


def _served(folder: Path, target: Target) -> Eagle3Draft:
    """An exported draft in the type that the target decodes in."""
    draft = load_exported(folder, embedding=target.embedding).to(target.device, target.dtype)
    return draft.eval().requires_grad_(False)


def _untrained(config: RunConfig, run: RunDir, target: Target) -> Eagle3Draft:
    """The draft as it was before training."""
    found = checkpoint.load_chosen(run, config.train.export)
    if found is None:
        raise InputError(f"{run.url} has no trained draft yet")
    ends = load_ends(config.target, device=str(target.device), with_last_layer=config.draft.start == "target_layer")
    draft, _ = fresh_draft(
        found.shape, config.draft, ends, d2t=found.draft["d2t"], t2d=found.draft["t2d"], seed=config.train.seed
    )
    return draft.to(target.device, target.dtype).eval().requires_grad_(False)
