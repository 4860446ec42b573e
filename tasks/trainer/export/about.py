"""What an exported draft tells about itself: the facts that its config.json keeps and its model card shows.

The card is a pure function of config.json, so that a folder that was read can be written again, byte for byte, in this
layout or another. It names hashes and counts, never where the data lies: cards are published.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tasks.trainer.errors import InputError

DRAFT_TOKENS = 4  # where nothing says how many: evaluate.draft_tokens' default


@dataclass(frozen=True, slots=True)
class Training:
    """What a draft was trained on."""

    data_hash: str
    """Of the prepared samples: ids of tokens and masks, in order."""
    samples: int
    supervised_tokens: int
    """Of one epoch."""
    steps: int
    """Optimizer steps of the exported checkpoint."""
    states: str
    """online, or offline."""
    fingerprint: str
    """Of the target: weights, tokenizer, chat template, auxiliary layers, dtype."""


@dataclass(frozen=True, slots=True)
class Tau:
    """A line of the table: tokens emitted per target forward, bonus token included."""

    prompts: str
    """Which ones."""
    num_prompts: int
    drafting: str
    """How was drafted, and at which temperature."""
    tau: float
    low: float | None
    """Of the 95% bootstrap interval over prompts; None for one prompt."""
    high: float | None


@dataclass(frozen=True, slots=True)
class About:
    """The facts. training and taus are empty for a draft that Eyas did not train."""

    target: str
    """As engines name the target: a hub id, or a path on the machine that serves it. Empty when unknown."""
    architectures: tuple[str, ...] = ()
    """Of the target's config.json; empty when unknown."""
    draft_tokens: int = DRAFT_TOKENS
    """The chain that serving commands draft, and that a speculators config proposes."""
    training: Training | None = None
    taus: tuple[Tau, ...] = field(default_factory=tuple)

    def document(self) -> dict[str, Any]:
        """As config.json keeps it, under `eyas`."""
        return {**asdict(self), "architectures": list(self.architectures), "taus": [asdict(tau) for tau in self.taus]}

    @classmethod
    def of_document(cls, document: Any, path: object) -> About:
        """The facts that `document` wrote, as far as they are there; path: for messages.

        Raises InputError when they are of another form.
        """
        try:
            training = document.get("training")
            return cls(
                target=document.get("target", ""),
                architectures=tuple(document.get("architectures", ())),
                draft_tokens=document.get("draft_tokens", DRAFT_TOKENS),
                training=None if training is None else Training(**training),
                taus=tuple(Tau(**tau) for tau in document.get("taus", ())),
            )
        except (AttributeError, TypeError) as error:
            raise InputError(
                f"{path}: its eyas facts are not this version's ({error}); export the run again with this version"
            ) from None


def measured_taus(acceptance: dict[str, Any], path: object) -> tuple[Tau, ...]:
    """The table from the `acceptance` of a run's evaluation.json (acceptance/summary.py): all prompts, then each
    domain, then each longer context; path: for messages. Raises InputError when another version wrote it."""
    try:
        if acceptance["drafting"] == "tree":
            drafting = f"tree of {acceptance['tree_tokens']} tokens, depth {acceptance['num_draft_tokens']}"
        else:
            drafting = f"chain of {acceptance['num_draft_tokens']}"
        temperature = acceptance["temperature"]
        drafting += ", greedy" if temperature == 0 else f", temperature {temperature:g}"

        def line(prompts: str, values: dict[str, Any], num_prompts: int) -> Tau:
            low, high = values["tau_interval"] or (None, None)
            return Tau(prompts, num_prompts, drafting, values["tau"], low, high)

        return (
            line("all", acceptance, acceptance["num_prompts"]),
            *(line(domain["name"], domain, domain["prompts"]) for domain in acceptance["domains"]),
            *(line(f"at {one['context']:,} tokens", one, one["prompts"]) for one in acceptance["lengthened"]),
        )
    except KeyError as error:
        raise InputError(f"{path} has no {error}, for another version of Eyas wrote it; run `eyas evaluate`") from None
