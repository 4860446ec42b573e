"""Speculative decoding of several prompts at once: chains and trees, greedy and sampling.

decode.py is the same for one prompt and a greedy chain, in thirty lines; this is what measures. A round of all texts:

    the draft grows a tree on each text      batch_drafter.py, tree.py
    the target runs over all their nodes     target_rows.py
    each text walks down its tree            sampling.py: exact, whatever was drafted
    both caches keep the way taken

A text that ends leaves the batch. Random numbers are each prompt's own, so that an answer does not depend on what it
was decoded beside.

`replay` puts another draft in the first one's place on answers already decoded, without the target. Greedy answers are
the same for every draft, so that is exactly what the draft would have done. A sampled answer is one draw from the
target; with candidates that are the draft's likeliest tokens a round accepts what the target's draw is among, so there
replaying is exact in distribution. Candidates that were drawn cannot be replayed, and are replayed as the likeliest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from tasks.trainer.acceptance.batch_drafter import BatchDrafter
from tasks.trainer.acceptance.decode import Decoded, until_eos
from tasks.trainer.acceptance.sampling import Choice, Walk, among, choose_drawn, distribution, draw, favoured, walk
from tasks.trainer.acceptance.statistics import Round
from tasks.trainer.acceptance.target_rows import TargetRows
from tasks.trainer.acceptance.tree import ROOT, DraftTree, TreeShape
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.target import Target


@dataclass(frozen=True, slots=True)
class Rules:
    """shape: of the trees; max_new_tokens: of an answer; temperature: 0 is greedy."""

    shape: TreeShape
    max_new_tokens: int
    temperature: float = 0.0


@dataclass(slots=True)
class _Text:
    """An answer in the making."""

    prompt: Tensor
    generator: torch.Generator
    answer: list[int] = field(default_factory=list)
    favoured: list[tuple[float, bool]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    aux_hidden: list[Tensor] = field(default_factory=list)


class _Verifier(Protocol):
    """What says which token is next: the target, or an answer that it gave before. Texts by their present places."""

    def begin(self, texts: Sequence[_Text]) -> list[tuple[int, Tensor]]:
        """Of each prompt the answer's first token, and aux_hidden [P, 3D]."""

    def ended(self, texts: Sequence[_Text]) -> list[bool]:
        """Which answers are complete."""

    def walk(self, texts: Sequence[_Text], trees: Sequence[DraftTree]) -> list[Walk]:
        """What each text emits next; the path may go past the end of a turn, tokens do not."""

    def accept(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Keep these nodes; returns their aux_hidden [r, 3D]."""

    def keep(self, texts: Sequence[int]) -> None:
        """Go on with these alone."""


def speculate(
    target: Target, draft: Eagle3Draft, prompts: Sequence[Tensor], rules: Rules, *, seeds: Sequence[int] | None = None
) -> list[Decoded]:
    """Answer a batch of prompts, int64 [P] each, P >= 1; an answer ends after an eos token or max_new_tokens.

    seeds: of each prompt, for what is drawn; default 0, 1, ... Of a Decoded, `seconds` is its share of the batch's.
    """
    began = time.perf_counter()
    texts = _texts(prompts, seeds)
    verifier = _Asked(target, draft, texts, rules)
    _run(texts, _drafter(draft, texts, rules), verifier, rules)
    seconds = (time.perf_counter() - began) / len(texts)
    return [
        Decoded(text.prompt, text.answer, text.rounds, torch.cat(text.aux_hidden), seconds, text.favoured)
        for text in texts
    ]


def replay(decoded: Sequence[Decoded], draft: Eagle3Draft, rules: Rules) -> list[list[Round]]:
    """The rounds that another draft would take on each answer (see the module docstring)."""
    rules = replace(rules, shape=replace(rules.shape, drawn=False))
    texts = _texts([one.prompt for one in decoded], None)
    _run(texts, _drafter(draft, texts, rules), _Played(decoded), rules)
    return [text.rounds for text in texts]


def _texts(prompts: Sequence[Tensor], seeds: Sequence[int] | None) -> list[_Text]:
    seeds = range(len(prompts)) if seeds is None else seeds
    return [_Text(prompt, torch.Generator().manual_seed(seed)) for prompt, seed in zip(prompts, seeds, strict=True)]


def _drafter(draft: Eagle3Draft, texts: Sequence[_Text], rules: Rules) -> BatchDrafter:
    longest = max(len(text.prompt) for text in texts)
    return BatchDrafter(draft, num_texts=len(texts), capacity=longest + rules.max_new_tokens, shape=rules.shape)


def _run(texts: Sequence[_Text], drafter: BatchDrafter, verifier: _Verifier, rules: Rules) -> None:
    """Decode until every text has ended. Texts are changed in place."""
    read, first = [], []
    for text, (token, aux_hidden) in zip(texts, verifier.begin(texts), strict=True):
        text.answer.append(token)
        text.aux_hidden.append(aux_hidden)
        read.append(torch.cat((text.prompt[1:], torch.tensor([token]))))
        first.append(aux_hidden)
    drafter.extend(read, first)
    live = list(texts)
    while True:
        going = [place for place, ended in enumerate(verifier.ended(live)) if not ended]
        if len(going) < len(live):
            if not going:
                return
            live = [live[place] for place in going]
            drafter.keep(going)
            verifier.keep(going)
        # A round emits one token more than it accepts: proposals that could not be emitted are not asked for.
        limits = [rules.max_new_tokens - len(text.answer) - 1 for text in live]
        generators = [text.generator for text in live]
        trees = drafter.grow(limits, temperature=rules.temperature, generators=generators)
        walks = verifier.walk(live, trees)
        kept = verifier.accept([[ROOT, *way.path][: len(way.tokens)] for way in walks])
        drafter.extend([torch.tensor(way.tokens) for way in walks], kept)
        for text, way, aux_hidden in zip(live, walks, kept, strict=True):
            num_emitted = len(way.tokens)
            text.rounds.append(Round(way.num_proposed, min(len(way.path), num_emitted), num_emitted))
            text.answer += way.tokens
            text.aux_hidden.append(aux_hidden)


class _Asked:
    """The target verifies."""

    def __init__(self, target: Target, draft: Eagle3Draft, texts: Sequence[_Text], rules: Rules) -> None:
        longest = max(len(text.prompt) for text in texts)
        capacity = longest + rules.max_new_tokens + rules.shape.num_tokens + 1
        self._rules = rules
        self._eos_token_ids = target.eos_token_ids
        self._target_ids = draft.target_ids.cpu()
        self._rows = TargetRows(target, num_texts=len(texts), capacity=capacity)
        self._aux_hidden = torch.empty(0)

    def begin(self, texts: Sequence[_Text]) -> list[tuple[int, Tensor]]:
        found = []
        for place, text in enumerate(texts):
            logits, aux_hidden = self._rows.read(place, text.prompt)
            found.append((self._token(logits, text), aux_hidden))
        return found

    def ended(self, texts: Sequence[_Text]) -> list[bool]:
        limit = self._rules.max_new_tokens
        return [text.answer[-1] in self._eos_token_ids or len(text.answer) >= limit for text in texts]

    def walk(self, texts: Sequence[_Text], trees: Sequence[DraftTree]) -> list[Walk]:
        walks = self._walk(texts, trees)
        return [replace(way, tokens=until_eos(way.tokens, self._eos_token_ids)) for way in walks]

    def _walk(self, texts: Sequence[_Text], trees: Sequence[DraftTree]) -> list[Walk]:
        logits, self._aux_hidden = self._rows.verify([text.answer[-1] for text in texts], trees)
        if self._rules.temperature == 0.0:
            best = logits.argmax(-1).tolist()
            return [walk(tree, _greedy(mine)) for tree, mine in zip(trees, best, strict=True)]
        return [self._sampled(tree, mine, text) for tree, mine, text in zip(trees, logits, texts, strict=True)]

    def accept(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        self._rows.accept(rows)
        return [self._aux_hidden[place, list(nodes)] for place, nodes in enumerate(rows)]

    def keep(self, texts: Sequence[int]) -> None:
        self._rows.keep(texts)

    def _token(self, logits: Tensor, text: _Text) -> int:
        if self._rules.temperature == 0.0:
            return int(logits.argmax())
        return draw(distribution(logits, self._rules.temperature), text.generator)

    def _sampled(self, tree: DraftTree, logits: Tensor, text: _Text) -> Walk:
        def choose(node: int, depth: int, candidates: Sequence[int]) -> tuple[int, int | None]:
            probabilities = distribution(logits[node], self._rules.temperature)
            if tree.log_q is None or not candidates:
                liked = torch.zeros_like(probabilities, dtype=torch.bool)
                liked[list(candidates)] = True
                token, child = among(draw(probabilities, text.generator), candidates)
            else:
                log_q = tree.log_q[node]
                liked = favoured(probabilities, log_q, self._target_ids)
                token, child = choose_drawn(probabilities, log_q, self._target_ids, candidates, text.generator)
            text.favoured.append((float(probabilities[liked].sum()), bool(liked[token])))
            return token, child

        return walk(tree, choose)


class _Played:
    """An answer says it again."""

    def __init__(self, decoded: Sequence[Decoded]) -> None:
        self._decoded = list(decoded)
        self._read: list[int] = []

    def begin(self, texts: Sequence[_Text]) -> list[tuple[int, Tensor]]:
        self._read = [len(one.prompt) for one in self._decoded]
        return [(one.answer[0], one.aux_hidden[: len(one.prompt)]) for one in self._decoded]

    def ended(self, texts: Sequence[_Text]) -> list[bool]:
        return [len(text.answer) >= len(one.answer) for text, one in zip(texts, self._decoded, strict=True)]

    def walk(self, texts: Sequence[_Text], trees: Sequence[DraftTree]) -> list[Walk]:
        return [
            walk(tree, _next_of(one.answer[len(text.answer) :]))
            for tree, one, text in zip(trees, self._decoded, texts, strict=True)
        ]

    def accept(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        found = [
            one.aux_hidden[read : read + len(nodes)]
            for one, read, nodes in zip(self._decoded, self._read, rows, strict=True)
        ]
        self._read = [read + len(nodes) for read, nodes in zip(self._read, rows, strict=True)]
        return found

    def keep(self, texts: Sequence[int]) -> None:
        self._decoded = [self._decoded[place] for place in texts]
        self._read = [self._read[place] for place in texts]


def _greedy(best: Sequence[int]) -> Choice:
    """The target's argmax at each node."""

    def choose(node: int, depth: int, candidates: Sequence[int]) -> tuple[int, int | None]:
        return among(best[node], candidates)

    return choose


def _next_of(rest: Sequence[int]) -> Choice:
    """An answer's next tokens."""

    def choose(node: int, depth: int, candidates: Sequence[int]) -> tuple[int | None, int | None]:
        return among(rest[depth], candidates) if depth < len(rest) else (None, None)

    return choose
