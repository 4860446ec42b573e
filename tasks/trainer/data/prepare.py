"""The prepare stage: conversations in, samples and draft vocabulary out. What it lists is what the run trains on.

Conversations stream through it, so memory does not grow with them (a hash a conversation apart); only regeneration,
which answers prompts sorted by length, holds all of them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tasks.trainer.config import RunConfig
from tasks.trainer.data.mask import ChatRenderer
from tasks.trainer.data.mixing import draw_limits, stream_sources
from tasks.trainer.data.prepared import PreparedData, PreparedSample, check_sides, is_held_out, make_samples, prompt_id
from tasks.trainer.data.read import Conversation, Refusals, nothing_read, stream_conversations
from tasks.trainer.data.regenerate import regenerate
from tasks.trainer.data.servers import Servers
from tasks.trainer.data.vocabulary import build_vocabulary, coverage_of, parent_vocabulary, special_tokens
from tasks.trainer.errors import InputError
from tasks.trainer.progress import Progress
from tasks.trainer.run_dir import RunDir
from tasks.trainer.target import Target
from tasks.trainer.target_text import TargetText, load_text, pick_device
from tasks.trainer.train.batches import Packs
from tasks.trainer.train.packing import unfilled_share
from tasks.trainer.train.profiling import check_profiling
from tasks.trainer.train.tracking import check_trackers

logger = logging.getLogger(__name__)

_MOST_DOMAINS = 12


def prepare_data(config: RunConfig, run: RunDir, progress: Progress) -> dict[str, Any]:
    """Read, hold out, regenerate if asked, render, and choose the draft vocabulary. Returns the receipt.

    Raises InputError for everything that is wrong with the data or the target.
    """
    settings = config.data
    device = pick_device(config.train.device)
    # What training would refuse hours later.
    check_trackers(config.train)
    check_profiling(config.train, device=device)
    text = load_text(
        config.target.model,
        dtype=config.target.dtype,
        aux_layer_ids=config.target.aux_layer_ids,
        chat_template=config.target.chat_template,
        revision=config.target.revision,
        device=device,
    )
    refusals = Refusals()
    sides = _Sides(config, refusals)
    training: Iterable[Conversation] = sides.training()
    heldout: Iterable[Conversation] = sides.heldout()
    arguments = {"date_string": settings.date_string}
    num_regenerated = 0
    if settings.regenerate:
        asked = list(training), list(heldout)
        answered = _answers(config, run, text, device, asked, arguments, refusals, progress)
        training, heldout = answered
        num_regenerated = sum(map(len, answered))
    renderer = ChatRenderer(text.tokenizer, text.eos_token_ids, template_arguments=arguments)
    prepared, domains = {}, {}
    for name, folder, conversations in (
        ("train", run.train_data, training),
        ("heldout", run.heldout_data, heldout),
    ):
        own, named = Refusals(), list[str]()
        samples = make_samples(
            conversations,
            renderer,
            max_tokens=settings.max_tokens,
            on_long=settings.on_long,
            # Held-out samples keep their length: what packs do to training must not change what is measured.
            pack_tokens=config.train.pack_tokens if name == "train" else None,
            long_documents=settings.long_documents,
            supervise=settings.supervise,
            workers=settings.workers,
            refusals=own,
        )
        prepared[name] = PreparedData.write(folder, _noting_domains(samples, named), own)
        domains[name] = group_domains(named)
        refusals.merge(own)
    target_vocab_size = int(text.config.vocab_size)
    counts = prepared["train"].count_supervised(target_vocab_size)
    if config.draft.vocabulary == "parent":
        assert config.draft.init is not None, "the config checks it"
        vocabulary = parent_vocabulary(config.draft.init, counts)
    else:
        vocabulary = build_vocabulary(
            counts,
            config.draft.vocab_size,
            special_tokens(text.tokenizer, text.eos_token_ids, counts),
            occurrences=prepared["train"].count_supervised(target_vocab_size, every=True),
        )
    vocabulary.save(run.vocabulary)
    return {
        "target": config.target.model,
        "fingerprint": text.fingerprint,
        "aux_layer_ids": list(text.aux_layer_ids),
        "hidden_size": int(text.config.hidden_size),
        "target_vocab_size": target_vocab_size,
        "device": device,
        "data_hash": prepared["train"].data_hash,
        "refused": refusals.counts,
        "refused_first": refusals.first,
        "supervised_cut": refusals.supervised_cut,
        "packs": _first_packs(config, prepared["train"]),
        "vocabulary_size": len(vocabulary),
        "coverage": vocabulary.coverage,
        "heldout_coverage": coverage_of(vocabulary, prepared["heldout"].count_supervised(target_vocab_size)),
        "vocabulary_unseen": int((counts[vocabulary.t2d] == 0).sum()),
        "regenerated": num_regenerated,
        "domains": dict(Counter(domains["train"]).most_common()),
        "heldout_domains": domains["heldout"],
        **{
            name: {"samples": len(data), "tokens": data.num_tokens, "supervised": data.num_supervised}
            for name, data in prepared.items()
        },
    }


def group_domains(domains: Sequence[str]) -> list[str]:
    """The same, one a sample, the rarest as "other" where there are many: a label of each line is no domain."""
    kept = {name for name, _ in Counter(domains).most_common(_MOST_DOMAINS)}
    return [name if name in kept else "other" for name in domains]


def _first_packs(config: RunConfig, data: PreparedData) -> dict[str, Any]:
    """What the first epoch's packs are like: their number, the share of their room that is empty, and how many
    documents are longer than one and so are packs alone."""
    settings = config.train
    packs = Packs(data.lengths, pack_tokens=settings.pack_tokens, seed=settings.seed).epoch(0)
    if len(packs) < settings.grad_accumulation:
        logger.warning(
            "an optimizer step takes train.grad_accumulation=%s packs and an epoch has %s: every sample is in a step "
            "about %.1f times; use fewer packs a step or a smaller train.pack_tokens",
            settings.grad_accumulation,
            len(packs),
            settings.grad_accumulation / len(packs),
        )
    return {
        "packs": len(packs),
        "pack_tokens": settings.pack_tokens,
        "unfilled": unfilled_share(data.lengths, packs, pack_tokens=settings.pack_tokens),
        "alone": int((data.lengths > settings.pack_tokens).sum()),
        "longest": int(data.lengths.max()),
    }


class _Sides:
    """The two sides of the data, each a pass over its files. Training goes first: what it holds is not held out."""

    def __init__(self, config: RunConfig, refusals: Refusals) -> None:
        self._settings = config.data
        self._refusals = refusals
        self._limits = draw_limits(config.data)
        self._trained: set[bytes] = set()
        self._num_training = self._num_heldout = 0

    def training(self) -> Iterator[Conversation]:
        """Raises InputError when there is none, after the last one of the files."""
        settings = self._settings
        for conversation in stream_sources(settings, self._limits, self._refusals):
            if settings.heldout_source:
                self._trained.add(bytes.fromhex(prompt_id(conversation)))
            elif is_held_out(conversation, settings.heldout_fraction):
                self._num_heldout += 1
                continue
            self._num_training += 1
            yield conversation
        if not settings.heldout_source:
            check_sides(self._num_training, self._num_heldout, settings.heldout_fraction)

    def heldout(self) -> Iterator[Conversation]:
        """A held-out prompt that is trained on would flatter the draft: it is left out and counted."""
        settings, url = self._settings, self._settings.heldout_source
        if url is None:
            for conversation in stream_sources(settings, self._limits, Refusals()):
                if is_held_out(conversation, settings.heldout_fraction):
                    yield conversation
            return
        num_read = num_kept = 0
        own = Refusals()
        for conversation, _ in stream_conversations(
            [url], on_error=settings.on_error, on_truncated=settings.on_truncated, refusals=own
        ):
            num_read += 1
            if bytes.fromhex(prompt_id(conversation)) in self._trained:
                own.add("heldout_prompt_in_training", conversation.where)
            else:
                num_kept += 1
                yield conversation
        if not num_read:
            raise nothing_read([url], own)
        if not num_kept:
            raise InputError(f"every prompt of data.heldout_source={url!r} is in data.source too; hold out other ones")
        self._refusals.merge(own)


def _noting_domains(samples: Iterable[PreparedSample], names: list[str]) -> Iterator[PreparedSample]:
    for sample in samples:
        names.append(sample.domain)
        yield sample


def _answers(
    config: RunConfig,
    run: RunDir,
    text: TargetText,
    device: str,
    parts: tuple[list[Conversation], list[Conversation]],
    arguments: dict[str, str],
    refusals: Refusals,
    progress: Progress,
) -> tuple[list[Conversation], list[Conversation]]:
    """Both parts with the target's own answers. A target in this process is freed on return."""
    settings = config.data
    folder = Path(settings.regenerate_dir) if settings.regenerate_dir else run.answers
    target: Target | Servers
    if settings.regenerate_servers:
        target = Servers(settings.regenerate_servers, text, model=settings.regenerate_model)
    else:
        target = Target.of(config.target, device=device)
    total = sum(len(part) for part in parts)

    def shown(before: int) -> Callable[[int, int, int], None]:
        return lambda done, _, tokens: progress(before + done, total, f"{tokens} tokens")

    done = [
        regenerate(
            target,
            part,
            out_dir=folder,
            fingerprint=text.fingerprint,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
            temperature=settings.temperature,
            temperatures=settings.temperatures,
            seed=settings.seed,
            template_arguments=arguments,
            refusals=refusals,
            progress=shown(before),
        )
        for before, part in ((0, parts[0]), (len(parts[0]), parts[1]))
    ]
    return done[0], done[1]
