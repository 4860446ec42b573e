"""Top-k targets: ids exactly, log-probabilities within a step, a row never above 1, and the tail's mass."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.schema import TopK, array_schemas
from storage.topk import LARGEST_LEVEL, LEVEL_STEP, TAIL_STEPS, decode_top_k, encode_top_k

# See storage.topk: two roundings of half a step, and half a step of the tail's log-odds; float32 of the result.
BOUND = LEVEL_STEP + 0.5 / TAIL_STEPS + 1e-5


def random_top_k(rng: np.random.Generator, rows: int, k: int, vocab_size: int, sharpness: float) -> TopK:
    """The k likeliest of a softmax over max(4 k, 100) tokens, with ids from all of the vocabulary, in random order."""
    logits = rng.standard_normal((rows, max(4 * k, 100))) * sharpness
    logits -= np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) + logits.max(1, keepdims=True)
    top = -np.sort(-logits, axis=1)[:, :k]
    ids = np.stack([rng.choice(vocab_size, k, replace=False) for _ in range(rows)]).astype(np.int32)
    return TopK(ids, top.astype(np.float32))


def round_trip(top_k: TopK, vocab_size: int) -> TopK:
    return decode_top_k(*encode_top_k(top_k, vocab_size=vocab_size))


def by_id(top_k: TopK) -> TopK:
    order = np.argsort(top_k.ids, axis=1)
    return TopK(*(np.take_along_axis(part, order, axis=1) for part in (top_k.ids, top_k.log_probabilities)))


def assert_mass_at_most_one(top_k: TopK) -> None:
    for row in top_k.log_probabilities:
        # exp of a float64 is off by 1e-16 of itself; the sum is exact.
        assert sum(Fraction(math.exp(float(value))) for value in row) <= 1 + Fraction(1, 10**14)


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 3.0, 12.0])
@pytest.mark.parametrize(("k", "vocab_size"), [(1, 100), (5, 70_000), (64, 49_152), (256, 151_936)])
def test_log_probabilities_come_back_within_a_step(k, vocab_size, sharpness):
    rng = np.random.default_rng([k, int(sharpness * 10)])
    top_k = random_top_k(rng, 40, k, vocab_size, sharpness)
    got, want = round_trip(top_k, vocab_size), by_id(top_k)
    assert got.ids.dtype == np.int32
    assert got.log_probabilities.dtype == np.float32
    np.testing.assert_array_equal(got.ids, want.ids)
    # What lies further below the likeliest than the levels reach is taken for that.
    floor = want.log_probabilities.max(1, keepdims=True) - LARGEST_LEVEL * LEVEL_STEP
    error = got.log_probabilities - np.maximum(want.log_probabilities, floor)
    assert np.abs(error).max() <= BOUND
    assert_mass_at_most_one(got)


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 3.0])
def test_the_tails_mass_comes_back(sharpness):
    # Red when the tail is taken from the rounded levels: theirs is off by some percent of the whole.
    top_k = random_top_k(np.random.default_rng(0), 200, 16, 1000, sharpness)
    tail, got = (
        1 - np.exp(part.log_probabilities.astype(np.float64)).sum(axis=1) for part in (top_k, round_trip(top_k, 1000))
    )
    np.testing.assert_allclose(got, tail, rtol=0.003, atol=1e-6)


def test_a_row_that_is_all_of_the_mass_has_no_tail():
    even = np.full((1, 4), np.log(0.25), dtype=np.float32)
    certain = np.array([[0.0, -40.0, -50.0, -60.0]], dtype=np.float32)
    over = np.full((1, 4), np.log(0.2501), dtype=np.float32)  # a target's own rounding
    for log_probabilities in (even, certain, over):
        got = round_trip(TopK(np.array([[9, 3, 5, 1]], np.int32), log_probabilities), 10)
        assert_mass_at_most_one(got)
        assert np.exp(got.log_probabilities.astype(np.float64)).sum() > 1 - 1e-5


def test_a_row_that_is_almost_nothing_keeps_its_mass():
    got = round_trip(TopK(np.array([[4, 2]], np.int32), np.array([[-50.0, -51.0]], np.float32)), 10)
    np.testing.assert_allclose(got.log_probabilities, [[-51.0, -50.0]], atol=BOUND)


@settings(max_examples=100, deadline=None)
@given(
    vocab_size=st.sampled_from([2**8, 2**16, 2**16 + 1, 2**24, 2**24 + 1, 2**31]),
    ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12, unique=True),
)
def test_any_ids_of_any_vocabulary(vocab_size, ids):
    # Red when a distance does not fit its bytes: the first and the last id are the extremes.
    row = sorted({value % vocab_size for value in ids} | {0, vocab_size - 1})
    top_k = TopK(np.array([row[::-1]], np.int32), np.full((1, len(row)), -3.0 * len(row), np.float32))
    np.testing.assert_array_equal(round_trip(top_k, vocab_size).ids, [row])


def test_no_rows_at_all():
    got = round_trip(TopK(np.empty((0, 7), np.int32), np.empty((0, 7), np.float32)), 100)
    assert got.ids.shape == got.log_probabilities.shape == (0, 7)


@pytest.mark.parametrize(("k", "columns"), [(256, 64), (64, 64), (100, 50), (97, 97), (5, 5)])
def test_chunks_divide_the_row(make_spec, k, columns):
    # Zarr's sharding needs chunks that divide the shard, and k is the user's.
    spec = make_spec(preset="small", vocab_size=1000)
    from dataclasses import replace

    spec = replace(spec, encoding=replace(spec.encoding, top_k=k))
    top_k = next(array for array in array_schemas(spec) if array.name == "topk")
    assert top_k.row_shape == (3, k)
    assert top_k.chunk_row_shape == (1, columns)
