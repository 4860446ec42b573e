"""The draft vocabulary: who is in, in which order, and back from its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from tasks.trainer.data.vocabulary import (
    Vocabulary,
    build_vocabulary,
    coverage_of,
    parent_vocabulary,
    special_tokens,
)
from tasks.trainer.errors import InputError

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|head|>", "<|eot|>")
COUNTS = np.array([0, 5, 9, 0, 5, 5, 1, 0], dtype=np.int64)


def test_most_frequent_then_lower_id_with_special_tokens_first() -> None:
    """Red when ties depend on the sort, or the end-of-turn token (7, never seen) loses its place."""
    assert build_vocabulary(COUNTS, 3).target_ids.tolist() == [1, 2, 4]
    vocabulary = build_vocabulary(COUNTS, 3, special=[7])
    assert vocabulary.target_ids.tolist() == [1, 2, 7]
    assert vocabulary.coverage == pytest.approx(14 / 25)


def test_a_short_list_is_filled_by_ascending_id() -> None:
    """Red when fewer tokens come out than asked for, or the fill order is not the stated one."""
    assert build_vocabulary(COUNTS, 7).target_ids.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_a_short_list_is_filled_by_what_prompts_hold_then_by_id() -> None:
    """Red when the fill is by id alone although the prompts say more, or it goes before a token that answers hold."""
    occurrences = COUNTS + np.array([1, 0, 0, 9, 0, 0, 0, 9], dtype=np.int64)
    sizes = {size: build_vocabulary(COUNTS, size, occurrences=occurrences).target_ids.tolist() for size in (5, 6, 7)}
    assert sizes == {5: [1, 2, 4, 5, 6], 6: [1, 2, 3, 4, 5, 6], 7: [1, 2, 3, 4, 5, 6, 7]}


def test_special_tokens_are_those_with_a_use(tokenizer_of: Callable[..., PreTrainedTokenizerBase]) -> None:
    """Red when a token that the template writes or answers hold is left out, or reserved ones take room."""
    tokenizer = tokenizer_of("chatml")
    names = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    counts = np.zeros(len(tokenizer), dtype=np.int64)
    assert special_tokens(tokenizer, (names["<|im_end|>"],), counts) == (names["<|im_start|>"], names["<|im_end|>"])
    counts[names["<|head|>"]] = 1
    assert names["<|head|>"] in special_tokens(tokenizer, (), counts)
    assert special_tokens(tokenizer, (names["<|eot|>"],), counts[:1]) == (names["<|eot|>"],)


def test_coverage_of_other_data() -> None:
    """Red when the held-out coverage is that of the training data."""
    vocabulary = build_vocabulary(COUNTS, 3)
    assert coverage_of(vocabulary, np.array([5, 0, 5, 0, 0, 0, 0, 0], dtype=np.int64)) == 0.5


def test_the_full_vocabulary_is_the_identity() -> None:
    """Red when Vd >= V is anything but d2t = 0."""
    for size in (8, 100, None):
        vocabulary = build_vocabulary(COUNTS, size)
        assert len(vocabulary) == 8
        assert not vocabulary.d2t.any()
        assert vocabulary.t2d.all()
        assert vocabulary.coverage == 1.0


@given(
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=40).filter(any),
    size=st.integers(1, 50),
    data=st.data(),
)
def test_d2t_t2d_and_index_agree(counts: list[int], size: int, data: st.DataObject) -> None:
    """Red when offset and membership differ, order is not ascending, or a left-out token has a higher count."""
    array = np.array(counts, dtype=np.int64)
    tokens = st.integers(0, len(counts) - 1)
    special = data.draw(st.sets(tokens, max_size=min(size, len(counts))))
    vocabulary = build_vocabulary(array, size, special)
    ids = vocabulary.target_ids
    assert vocabulary.d2t.dtype == np.int64
    assert len(ids) == min(size, len(counts))
    assert np.flatnonzero(vocabulary.t2d).tolist() == ids.tolist()
    assert special <= set(ids.tolist())
    assert vocabulary.draft_index[ids].tolist() == list(range(len(ids)))
    assert (vocabulary.draft_index[~vocabulary.t2d] == -1).all()
    chosen = [counts[i] for i in ids.tolist() if i not in special]
    left_out = array[~vocabulary.t2d].tolist()
    assert not chosen or not left_out or min(chosen) >= max(left_out)


def test_save_and_load(tmp_path: Path) -> None:
    """Red when a value is lost on the way, or a scratch file stays."""
    vocabulary = build_vocabulary(COUNTS, 3, special=[7])
    path = tmp_path / "vocabulary.safetensors"
    vocabulary.save(path)
    loaded = Vocabulary.load(path)
    assert loaded.d2t.tolist() == vocabulary.d2t.tolist()
    assert loaded.t2d.tolist() == vocabulary.t2d.tolist()
    assert loaded.coverage == vocabulary.coverage
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_wrong_input_is_named(tmp_path: Path) -> None:
    """Red when an impossible request or a damaged file gives a vocabulary all the same."""
    with pytest.raises(InputError, match=r"draft\.vocab_size=1 has no room for the 2"):
        build_vocabulary(COUNTS, 1, special=[1, 2])
    with pytest.raises(InputError, match="special token 8 is outside"):
        build_vocabulary(COUNTS, 3, special=[8])
    with pytest.raises(InputError, match="no supervised token"):
        build_vocabulary(np.zeros(8, dtype=np.int64), 3)
    path = tmp_path / "v.safetensors"
    with pytest.raises(InputError, match="holds no draft vocabulary"):
        Vocabulary.load(path)
    path.write_bytes(b"not safetensors")
    with pytest.raises(InputError, match="holds no draft vocabulary"):
        Vocabulary.load(path)
    vocabulary = build_vocabulary(COUNTS, 3)
    # d2t as target ids, the mistake that is made with this format
    save_file({"d2t": vocabulary.target_ids, "t2d": vocabulary.t2d}, path, metadata={"coverage": "1.0"})
    with pytest.raises(InputError, match="do not name the same tokens"):
        Vocabulary.load(path)


def write_parent(folder: Path, **tensors: np.ndarray) -> str:
    """An exported draft as far as its vocabulary goes."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"fc.weight": np.zeros((1, 1), np.float32), **tensors}, folder / "model.safetensors")
    return str(folder)


def test_a_parents_vocabulary_is_taken_as_it_is(tmp_path: Path) -> None:
    """Red when draft.vocabulary=parent chooses tokens by tonight's counts, or reports the coverage of other data; a
    parent without d2t has the whole vocabulary."""
    init = write_parent(tmp_path / "parent", d2t=np.array([1, 4, 4], dtype=np.int32))
    vocabulary = parent_vocabulary(init, COUNTS)
    assert vocabulary.target_ids.tolist() == [1, 5, 6]
    assert vocabulary.t2d.tolist() == [False, True, False, False, False, True, True, False]
    assert vocabulary.coverage == pytest.approx(11 / 25)
    whole = parent_vocabulary(write_parent(tmp_path / "whole"), COUNTS)
    assert whole.target_ids.tolist() == list(range(8))
    assert whole.coverage == 1.0


def test_a_parent_of_another_target_is_refused(tmp_path: Path) -> None:
    """Red when draft tokens outside the target's vocabulary, or twice the same, are trained."""
    for name, d2t in (("outside", [0, 7]), ("negative", [-1, 0]), ("twice", [1, 0])):
        init = write_parent(tmp_path / name, d2t=np.array(d2t, dtype=np.int64))
        with pytest.raises(InputError, match=r"draft\.vocabulary=data"):
            parent_vocabulary(init, COUNTS)
