"""The forms in which states lie in arrays: each is undone exactly."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.forms import (
    LARGEST_PAIRED_CODE,
    PLANES_FILL,
    dtype_of,
    form_of,
    from_form,
    largest_code,
    row_shape,
    to_form,
)
from storage.presets import PRESETS, Encoding


@pytest.mark.parametrize("form", ["codes", "pairs", "planes", "bits"])
@given(hidden=st.integers(1, 9), rows=st.integers(0, 4), seed=st.integers(0, 99))
def test_a_form_is_undone(form, hidden, rows, seed):
    rng = np.random.default_rng(seed)
    if form in ("codes", "pairs"):
        largest = largest_code(form)
        states = rng.integers(-largest, largest + 1, (rows, 3, hidden)).astype(np.int8)
    else:
        states = rng.integers(0, 1 << 16, (rows, 3, hidden)).astype(np.uint16)
    array = to_form(states, form)
    assert array.dtype == dtype_of(form)
    assert array.shape == (rows, 3, *row_shape(form, hidden))
    again = from_form(array, form, hidden)
    assert again.dtype == states.dtype
    assert again.flags.c_contiguous
    np.testing.assert_array_equal(again, states)
    over = from_form(array, form, hidden, overwrite=True)
    # Red when merging in place reads what it has already written, or makes a copy after all.
    np.testing.assert_array_equal(over, states)
    assert form != "planes" or not over.size or np.shares_memory(over, array)


def test_pairs_are_what_the_document_says():
    # Red when the order of the two codes, or the base, changes: another program could not read the store.
    codes = np.array([[-7, 7, 0, 3, 5]], dtype=np.int8)
    assert to_form(codes, "pairs").tolist() == [[0 + 15 * 14, 7 + 15 * 10, 12 + 15 * 7]]


def test_planes_are_what_the_document_says():
    # 1.0 is 0x3F80: its exponent 127 less 31 is 96, so bits 13 to 6 are 96 * 2. -1.5 - 2^-7 is 0xBFC1.
    assert to_form(np.array([[0x3F80, 0xBFC1]], dtype=np.uint16), "planes").tolist() == [[[192, 193], [0, 129]]]


def test_every_bfloat16_survives_its_planes():
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).reshape(-1, 32)
    for overwrite in (False, True):
        np.testing.assert_array_equal(from_form(to_form(bits, "planes"), "planes", 32, overwrite=overwrite), bits)


def test_what_fills_planes_is_no_number():
    # Red when a row that nobody wrote can be taken for a hidden state.
    bits = from_form(np.full((1, 2, 3), PLANES_FILL, np.uint8), "planes", 3)
    assert np.isnan((bits.astype(np.uint32) << 16).view(np.float32)).all()


def test_what_pads_a_chunk_decodes_to_something():
    # A window's last chunk is decoded with its padding; a table that is too short would raise, or read beyond itself.
    assert from_form(np.full((1, 2), 255, np.uint8), "pairs", 4).tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("preset", "aux", "last"),
    [
        ("lossless", "planes", "planes"),
        ("near", "codes", "codes"),
        ("compact", "codes", "codes"),
        ("small", "codes", None),
        ("tiny", "pairs", None),
    ],
)
def test_forms_of_the_presets(preset, aux, last):
    assert form_of(PRESETS[preset], "aux") == aux
    if last is not None:
        assert form_of(PRESETS[preset], "last") == last


def test_other_codecs_keep_lossless_states_as_plain_bits():
    for codec in ("blosc", "raw"):
        encoding = dataclasses.replace(PRESETS["lossless"], codec=codec, level=0 if codec == "raw" else 1)
        assert form_of(encoding, "aux") == form_of(encoding, "last") == "bits"
    assert form_of(Encoding(aux_step=None, last="hidden", last_step=1.0), "last") == "pairs"
    assert LARGEST_PAIRED_CODE == 7
