"""Prepared data: cutting and refusing with counts, the split by prompt, the folder and its receipt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from tasks.trainer.data.mask import ChatRenderer
from tasks.trainer.data.prepared import PreparedData, PreparedSample, make_samples, prompt_id, sample_id, split
from tasks.trainer.data.read import Conversation, Message, Refusals
from tasks.trainer.errors import InputError


def conversation(question: str, answer: str | None, line: int = 1, finish: str | None = None) -> Conversation:
    messages = [Message("user", question)]
    if answer is not None:
        messages.append(Message("assistant", answer, finish))
    return Conversation("a.jsonl", line, tuple(messages))


@pytest.fixture(scope="module")
def renderer(tokenizer_of: Callable[..., PreTrainedTokenizerBase], eos_ids: tuple[int, ...]) -> ChatRenderer:
    return ChatRenderer(tokenizer_of("chatml"), eos_ids)


def sample(ids: list[int], mask: list[bool]) -> PreparedSample:
    token_ids, loss_mask = np.array(ids, dtype=np.int32), np.array(mask)
    return PreparedSample(sample_id(token_ids, loss_mask), token_ids, loss_mask)


TWO = [sample([1, 2, 3], [False, True, True]), sample([4, 5], [True, True])]


def test_sample_id_is_of_ids_and_mask() -> None:
    """Red when the id ignores the mask or the ids' order, depends on the dtype's width, or changes between versions:
    then a store captured yesterday no longer serves."""
    ids, mask = np.array([1, 2, 3], dtype=np.int32), np.array([False, True, True])
    raw = b"\1\0\0\0\2\0\0\0\3\0\0\0" + b"\0\1\1"
    assert sample_id(ids, mask) == hashlib.blake2b(raw, digest_size=16).hexdigest()
    assert sample_id(ids.astype(np.int64), mask) == sample_id(ids, mask)
    assert len({sample_id(ids, mask), sample_id(ids, ~mask), sample_id(ids[::-1].copy(), mask)}) == 3


def test_every_reason_is_counted_with_its_first_place(renderer: ChatRenderer) -> None:
    """Red when a sample goes missing without a count, or one that cannot train gets in."""
    long = "The end of the day, the end of the answer. " * 4
    conversations = [
        conversation("q", "The end", 1),
        conversation("q", "The end", 2),  # duplicate
        conversation("q", None, 3),  # nothing_supervised
        conversation("q", long, 4),  # cut_too_long, kept
        conversation(long, "The end", 5),  # no_supervised_left_after_cut
        conversation("q", "T", 6, finish="length"),  # one supervised token
        conversation("q", " ", 7),  # the renderer's empty_answer
        conversation("r", " ", 8),
    ]
    refusals = Refusals()
    samples = list(make_samples(conversations, renderer, max_tokens=40, refusals=refusals))
    assert [len(s.token_ids) for s in samples] == [len(renderer.render(conversations[0])[0]), 40]
    assert refusals.counts == {
        "duplicate": 1,
        "nothing_supervised": 1,
        "cut_too_long": 1,
        "no_supervised_left_after_cut": 1,
        "fewer_than_two_supervised_in_a_row": 1,
        "empty_answer": 2,
    }
    assert refusals.first["empty_answer"] == "a.jsonl, line 7"
    assert len(samples) + refusals.total - refusals.counts["cut_too_long"] == len(conversations)
    assert refusals.supervised_cut == lost(conversations[3:4], renderer, 40)
    refusals = Refusals()
    assert (
        len(list(make_samples(conversations[3:4], renderer, max_tokens=40, on_long="refuse", refusals=refusals))) == 0
    )
    assert refusals.counts == {"too_long": 1}
    assert refusals.supervised_cut == 0, "what is refused is not cut"


def lost(conversations: list[Conversation], renderer: ChatRenderer, limit: int) -> int:
    return sum(int(renderer.render(each)[1][limit:].sum()) for each in conversations)


@pytest.mark.parametrize(
    ("long_documents", "max_tokens", "lengths", "counts"),
    [
        ("alone", None, [None, None], {}),
        ("cut", None, [None, 40], {"cut_to_pack": 1}),
        ("refuse", None, [None], {"longer_than_pack": 1}),
        ("alone", 60, [None, 60], {"cut_too_long": 1}),
        ("cut", 60, [None, 40], {"cut_to_pack": 1}),
        ("refuse", 60, [None], {"longer_than_pack": 1}),
        ("refuse", 36, [None, 36], {"cut_too_long": 1}),
    ],
)
def test_a_document_longer_than_the_pack(
    long_documents: str,
    max_tokens: int | None,
    lengths: list[int | None],
    counts: dict[str, int],
    renderer: ChatRenderer,
) -> None:
    """Red when a document longer than the pack is not kept whole, cut to its first tokens or refused as asked, with a
    count of what was lost; or when max_tokens, which comes first, leaves it short enough and it is touched again."""
    long = "The end of the day, the end of the answer. " * 4
    conversations = [conversation("q", "The end", 1), conversation("q", long, 2)]
    refusals = Refusals()
    samples = list(
        make_samples(conversations, renderer, max_tokens=max_tokens, pack_tokens=40,
                     long_documents=long_documents, refusals=refusals)  # type: ignore[arg-type]
    )  # fmt: skip
    for made, length, origin in zip(samples, lengths, conversations[: len(lengths)], strict=True):
        token_ids, loss_mask = renderer.render(origin)
        assert made.token_ids.tolist() == token_ids[:length].tolist()
        assert made.loss_mask.tolist() == loss_mask[:length].tolist()
    assert refusals.counts == counts
    kept = lengths[-1] if len(lengths) == 2 and lengths[-1] else None
    assert refusals.supervised_cut == (lost(conversations[1:], renderer, kept) if kept else 0)


def test_the_split_follows_the_prompt_alone() -> None:
    """Red when regenerated answers, more data or another order move a prompt between training and held-out."""
    first = [conversation(f"question {i}", "an answer", i) for i in range(200)]
    train, held_out = split(first, 0.2)
    assert len(train) + len(held_out) == 200
    assert 20 <= len(held_out) <= 60  # 40 expected; beyond 3.5 standard deviations the hash is not uniform
    again = [conversation(f"question {i}", "quite another", i) for i in range(399, -1, -1)]
    _, held_out_again = split(again, 0.2)
    assert {prompt_id(c) for c in held_out} == {prompt_id(c) for c in held_out_again if c.line < 200}
    assert split(first, 0.0) == (first, [])
    with pytest.raises(InputError, match=r"heldout_fraction=1e-12 of 200 .* no held-out one"):
        split(first, 1e-12)


def test_write_and_open(tmp_path: Path) -> None:
    """Red when a sample comes back changed, arrays are copied instead of mapped, or the counts are off."""
    refusals = Refusals({"duplicate": 2}, {"duplicate": "a.jsonl, line 2"}, supervised_cut=7)
    PreparedData.write(tmp_path / "train", iter(TWO), refusals)
    data = PreparedData.open(tmp_path / "train")
    assert len(data) == 2
    for got, expected in zip(data, TWO, strict=True):
        assert got.sample_id == expected.sample_id
        assert got.token_ids.dtype == np.int32
        assert got.token_ids.tolist() == expected.token_ids.tolist()
        assert got.loss_mask.tolist() == expected.loss_mask.tolist()
        assert isinstance(got.token_ids.base, np.memmap)
        assert not got.token_ids.flags.writeable
    assert data[-1].sample_id == TWO[1].sample_id
    with pytest.raises(IndexError):
        data[2]
    assert (data.num_tokens, data.num_supervised) == (5, 4)
    assert data.lengths.tolist() == [3, 2]
    assert data.refusals == refusals
    other = PreparedData.write(tmp_path / "other", reversed(TWO))
    assert other.data_hash != data.data_hash
    assert PreparedData.write(tmp_path / "other", TWO).data_hash == data.data_hash


def test_counts_of_supervised_tokens(tmp_path: Path) -> None:
    """Red when unsupervised tokens are counted, or a token beyond the target's vocabulary is dropped in silence."""
    data = PreparedData.write(tmp_path, TWO)
    assert data.count_supervised(7).tolist() == [0, 0, 1, 1, 1, 1, 0]
    with pytest.raises(InputError, match="token id 5 is outside the target's vocabulary of 5"):
        data.count_supervised(5)


def test_nothing_supervised_at_all_is_an_error(tmp_path: Path, renderer: ChatRenderer) -> None:
    """Red when an empty set is written, or it destroys the complete one that was there."""
    PreparedData.write(tmp_path, TWO)
    refusals = Refusals()
    samples = make_samples([conversation("q", None)], renderer, refusals=refusals)
    with pytest.raises(
        InputError, match=r"no conversation leaves a sample .* 1 nothing_supervised \(first: a.jsonl, line 1\)"
    ):
        PreparedData.write(tmp_path, samples, refusals)
    assert len(PreparedData.open(tmp_path)) == 2
    # One supervised token each: no pair to train on, whatever their number.
    single = [conversation(f"q{number}", "T", number, finish="length") for number in range(3)]
    refusals = Refusals()
    with pytest.raises(InputError, match="refused: 3 fewer_than_two_supervised_in_a_row"):
        PreparedData.write(tmp_path, make_samples(single, renderer, refusals=refusals), refusals)


def test_an_incomplete_or_altered_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when half-written or altered data opens; the old receipt must not vouch for new arrays."""
    with pytest.raises(InputError, match="no complete prepared data"):
        PreparedData.open(tmp_path / "missing")
    for name in ("token_ids", "loss_mask", "offsets", "sample_ids"):
        path = tmp_path / f"{name}.npy"
        PreparedData.write(tmp_path, TWO)
        raw = path.read_bytes()
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(InputError, match=f"{name}.npy does not match its receipt"):
            PreparedData.open(tmp_path)
        path.unlink()
        with pytest.raises(InputError, match=f"{name}.npy is missing"):
            PreparedData.open(tmp_path)
    PreparedData.write(tmp_path, TWO)
    (tmp_path / "receipt.json").write_text('{"format": 1')
    with pytest.raises(InputError, match=r"receipt.json is damaged"):
        PreparedData.open(tmp_path)
    (tmp_path / "receipt.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(InputError, match="not of format 1"):
        PreparedData.open(tmp_path)

    PreparedData.write(tmp_path, TWO)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        PreparedData.write(tmp_path, TWO[:1])
    with pytest.raises(InputError, match="no complete prepared data"):
        PreparedData.open(tmp_path)


def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path: Path) -> None:
    """Red when a file in the way ends in a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written: .* choose another run_dir"):
        PreparedData.write(tmp_path / "file" / "train", TWO)
