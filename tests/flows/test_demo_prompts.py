"""The demo recipe's prompt sets: enough of them, well formed, and truly apart.

The demo judges a draft model on `heldout.jsonl` after training on answers to `prompts.jsonl`, so its numbers
mean something only while the held-out prompts are not rewordings of the training ones.
"""

import json
import re
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "flows" / "recipes" / "demo"
FILES = {"prompts": DEMO / "prompts.jsonl", "heldout": DEMO / "heldout.jsonl"}
DOMAINS = {"explain", "list", "howto", "write", "compare", "advice", "story", "code", "fact"}

# Bounds for "truly apart". The files as written stand at 0 shared 5-grams, a prompt overlap of 0.29 and a
# frame overlap of 0.29, so each bound leaves room for an edit but not for a copied template.
MAX_SHARED_5GRAMS = 0.005  # of the held-out set's distinct word 5-grams, those that training also has
MAX_PROMPT_OVERLAP = 0.5  # Jaccard overlap of the words of one held-out and one training prompt
MAX_FRAME_OVERLAP = 0.5  # the same, for the words that all the prompts of a template have in common


def load(name: str) -> list[dict]:
    return [json.loads(line) for line in FILES[name].read_text(encoding="utf-8").splitlines()]


def text(row: dict) -> str:
    return row["messages"][0]["content"]


def words(content: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", content.lower())


def five_grams(content: str) -> set[tuple[str, ...]]:
    found = words(content)
    return {tuple(found[i : i + 5]) for i in range(len(found) - 4)}


def overlap(a: set[str], b: set[str]) -> float:
    return len(a & b) / len(a | b)


def all_five_grams(rows: list[dict]) -> set[tuple[str, ...]]:
    return set().union(*(five_grams(text(row)) for row in rows))


def shared_five_grams(train: list[dict], held: list[dict]) -> float:
    held_grams = all_five_grams(held)
    return len(held_grams & all_five_grams(train)) / len(held_grams)


def closest_prompts(train: list[dict], held: list[dict]) -> tuple[float, str, str]:
    bags = [(set(words(text(row))), row["id"]) for row in train]
    return max((overlap(set(words(text(row))), bag), row["id"], i) for row in held for bag, i in bags)


def by_template(rows: list[dict]) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        groups[row["template"]].append(row)
    return groups


def frames(rows: list[dict]) -> dict[str, set[str]]:
    """For each template, the words that every one of its prompts has."""
    return {
        template: set.intersection(*(set(words(text(row))) for row in group))
        for template, group in by_template(rows).items()
    }


def closest_frames(train: list[dict], held: list[dict]) -> tuple[float, str, str]:
    train_frames = frames(train).items()
    return max((overlap(h, t), hid, tid) for hid, h in frames(held).items() for tid, t in train_frames)


def test_counts() -> None:
    """Red when a file is cut down, or when a template has so few topics that its frame cannot be told."""
    train, held = load("prompts"), load("heldout")
    assert len(train) >= 200
    assert len(held) >= 48
    assert len(by_template(train)) >= 40
    assert len(by_template(held)) >= 12
    assert min(len(group) for group in by_template(train).values()) >= 4
    assert min(len(group) for group in by_template(held).values()) >= 3


@pytest.mark.parametrize("name", sorted(FILES))
def test_rows_are_well_formed(name: str) -> None:
    """Red on a missing or extra key, an id that does not begin with its template, an unknown domain, a
    message that is not one clean user turn, an unfilled slot, a double space, or a prompt as long as a page.
    """
    for row in load(name):
        assert set(row) == {"id", "template", "domain", "messages"}, row
        assert re.fullmatch(r"[th]\d{3}-\d{2}", row["id"]), row
        assert row["id"].rsplit("-", 1)[0] == row["template"], row
        assert row["domain"] in DOMAINS, row
        assert len(row["messages"]) == 1, row
        assert set(row["messages"][0]) == {"role", "content"}, row
        assert row["messages"][0]["role"] == "user", row
        content = text(row)
        assert content == content.strip(), row
        assert not re.search(r"\{\d\}", content), row
        assert "  " not in content.replace("\n    ", "\n"), row
        assert 3 <= len(words(content)) <= 60, row


@pytest.mark.parametrize("name", sorted(FILES))
def test_files_are_plain_json_lines(name: str) -> None:
    """Red on an empty line, a carriage return or byte-order mark, or a last line with no newline."""
    raw = FILES[name].read_bytes()
    assert raw.endswith(b"}\n")
    assert b"\r" not in raw
    assert raw.startswith(b"{")
    assert b"\n\n" not in raw


def test_ids_and_contents_are_unique() -> None:
    """Red when an id is used twice, or a prompt is asked twice up to case and punctuation, in either file."""
    rows = load("prompts") + load("heldout")
    assert [i for i, n in Counter(row["id"] for row in rows).items() if n > 1] == []
    # symbols count inside code, so only sentence punctuation is dropped
    contents = Counter(re.sub(r"[\s.,!?;:]+", " ", text(row).lower()).strip() for row in rows)
    assert [content for content, n in contents.items() if n > 1] == []


def test_every_domain_is_in_both_files() -> None:
    """Red when a domain is missing from a file, or when one template's prompts disagree on their domain."""
    for name in FILES:
        rows = load(name)
        assert {row["domain"] for row in rows} == DOMAINS, name
        for template, group in by_template(rows).items():
            assert len({row["domain"] for row in group}) == 1, template


def test_every_prefix_of_two_hundred_covers_the_domains() -> None:
    """Red when the training file is sorted by template, so that a run on its first lines sees few domains."""
    assert {row["domain"] for row in load("prompts")[:200]} == DOMAINS


def test_no_template_is_in_both_files() -> None:
    """Red when a held-out prompt carries the template id of a training prompt."""
    assert not by_template(load("prompts")).keys() & by_template(load("heldout")).keys()


def test_heldout_shares_few_five_grams_with_training() -> None:
    """Red when more than 0.5% of the held-out word 5-grams are in training: a sentence or a frame was reused."""
    assert shared_five_grams(load("prompts"), load("heldout")) <= MAX_SHARED_5GRAMS


def test_no_heldout_prompt_is_close_to_a_training_prompt() -> None:
    """Red when a held-out prompt has half its words in common with one training prompt, in any order."""
    score, held_id, train_id = closest_prompts(load("prompts"), load("heldout"))
    assert score < MAX_PROMPT_OVERLAP, (held_id, train_id)


def test_no_heldout_frame_is_close_to_a_training_frame() -> None:
    """Red when a held-out template is a training template with new topics, even one too short for 5-grams."""
    score, held_id, train_id = closest_frames(load("prompts"), load("heldout"))
    assert score < MAX_FRAME_OVERLAP, (held_id, train_id)


def test_training_templates_are_different_tasks() -> None:
    """Red when two training templates are one frame under two ids, which would overstate the variety."""
    for (a, frame_a), (b, frame_b) in combinations(frames(load("prompts")).items(), 2):
        assert overlap(frame_a, frame_b) < MAX_FRAME_OVERLAP, (a, b)


def test_the_checks_see_a_reused_template() -> None:
    """Red when the measures above go blind: a copied prompt, and every training template given new topics,
    must each break the bound that is there to catch it.
    """
    train, held = load("prompts"), load("heldout")
    copied = {**train[0], "id": "h999-00", "template": "h999"}
    assert closest_prompts(train, [*held, copied])[0] >= MAX_PROMPT_OVERLAP
    for template, group in by_template(train).items():
        kept, moved = group[: len(group) // 2], group[len(group) // 2 :]
        planted = [{**row, "template": "h999"} for row in moved]
        score, _, train_id = closest_frames(kept, planted)
        assert (score >= MAX_FRAME_OVERLAP, train_id) == (True, template)
    first = [row for group in by_template(train).values() for row in group[::2]]
    second = [row for group in by_template(train).values() for row in group[1::2]]
    assert shared_five_grams(first, second) > MAX_SHARED_5GRAMS
