"""Specs and encodings that cannot be: each refused with the field and its value."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from storage.errors import StoreError
from storage.presets import DEFAULT_PRESET, PRESETS, Encoding, encoding_of, preset_name
from storage.schema import (
    array_schemas,
    attributes_of,
    raw_bytes,
    require_same_spec,
    spec_of,
    target_rows,
    target_window,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": "../up"}, "fingerprint '../up'"),
        ({"fingerprint": ""}, "fingerprint ''"),
        ({"fingerprint": ".hidden"}, "fingerprint '.hidden'"),
        ({"aux_layer_ids": (1, 2)}, r"aux_layer_ids \(1, 2\)"),
        ({"aux_layer_ids": (3, 2, 5)}, r"aux_layer_ids \(3, 2, 5\)"),
        ({"aux_layer_ids": (-1, 2, 5)}, r"aux_layer_ids \(-1, 2, 5\)"),
        ({"hidden_size": 0}, "hidden_size 0"),
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"vocab_size": 2**31 + 1}, "vocab_size 2147483649 must be at most 2147483648"),
        ({"shard_tokens": 10}, "shard_tokens 10 must be a multiple of chunk_tokens 4"),
        ({"encoding": PRESETS["small"]}, "top_k 256 must be at most vocab_size 50"),
    ],
)
def test_impossible_specs_are_refused(make_spec, changes, message):
    # Red when a field loses its check or its message the value.
    with pytest.raises(StoreError, match=message):
        make_spec(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codec": "zip"}, "codec 'zip' is unknown; use one of zstd, blosc, raw"),
        ({"level": 40}, "level 40 of codec zstd must lie in 1 to 19"),
        ({"codec": "raw", "level": 1}, "level 1 of codec raw must lie in 0 to 0"),
        ({"aux_step": 0.0}, "aux_step 0.0 must lie in"),
        ({"aux_step": float("nan")}, "aux_step nan must lie in"),
        ({"last_step": 9.0}, "last_step 9.0 must lie in"),
        ({"last": "logits"}, "last 'logits' is unknown; use one of hidden, topk"),
        ({"top_k": 5}, "top_k 5 is for last=topk"),
        ({"last": "topk", "last_step": None}, "top_k None must lie in 1 to 65536"),
        ({"last": "topk", "last_step": None, "top_k": 0}, "top_k 0 must lie in"),
        ({"last": "topk", "top_k": 5}, "last_step 0.05 is for last=hidden"),
    ],
)
def test_impossible_encodings_are_refused(changes, message):
    with pytest.raises(StoreError, match=message):
        dataclasses.replace(PRESETS["near"], **changes)


def test_presets_have_names():
    assert list(PRESETS) == ["lossless", "near", "compact", "small", "tiny"]
    assert DEFAULT_PRESET == "near"
    assert [preset_name(encoding) for encoding in PRESETS.values()] == list(PRESETS)
    assert preset_name(dataclasses.replace(PRESETS["near"], aux_step=0.2)) == "custom"
    assert [encoding.lossless for encoding in PRESETS.values()] == [True, False, False, False, False]


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_spec_survives_its_attributes(make_spec, preset):
    spec = make_spec(preset=preset)
    assert spec_of(json.loads(json.dumps(attributes_of(spec))), where="here") == spec


def test_a_store_of_version_1_is_named(make_spec):
    with pytest.raises(StoreError, match="here has format version 1; this release reads 2: capture into another store"):
        spec_of({**attributes_of(make_spec()), "format_version": 1}, where="here")


@pytest.mark.parametrize(
    "encoding",
    [
        None,
        {},
        {**dataclasses.asdict(PRESETS["near"]), "more": 1},
        {**dataclasses.asdict(PRESETS["near"]), "aux_step": "0.1"},
        {**dataclasses.asdict(PRESETS["near"]), "level": True},
        {**dataclasses.asdict(PRESETS["near"]), "codec": ["zstd"]},
    ],
)
def test_an_unreadable_encoding_is_a_store_error(make_spec, encoding):
    with pytest.raises(StoreError):
        encoding_of(encoding)
    attributes = attributes_of(make_spec())
    attributes["spec"]["encoding"] = encoding
    with pytest.raises(StoreError, match="here holds an unreadable spec"):
        spec_of(attributes, where="here")


def test_the_differing_field_of_an_encoding_is_named(make_spec):
    with pytest.raises(
        StoreError, match=r"spec: aux_step is 0.1 there, 0.3 here; last_step is 0.05 there, 0.1 here\. Use"
    ):
        require_same_spec(make_spec(preset="near"), make_spec(preset="compact"), where="store")


def target_rows_by_the_rule(mask: list[bool]) -> list[int]:
    """TRAINING rule, word for word: row p of step k reads the distribution at p+1+k and counts when x[p+1..p+2+k] are
    all supervised."""
    num = len(mask)
    return sorted(
        {p + 1 + k for p in range(num) for k in range(num) if p + 2 + k < num and all(mask[p + 1 : p + 3 + k])}
    )


@pytest.mark.parametrize("seed", range(20))
def test_target_rows_are_those_that_a_step_reads(seed):
    rng = np.random.default_rng(seed)
    mask = rng.random(rng.integers(1, 30)) < 0.6
    rows = target_rows(mask)
    assert rows.dtype == np.int64
    assert rows.tolist() == target_rows_by_the_rule(mask.tolist())
    for start in range(len(mask)):
        for stop in range(start + 1, len(mask) + 1):
            first, last = target_window(mask, start, stop)
            assert (rows[first:last] - start).tolist() == target_rows(mask[start:stop]).tolist()


def test_array_names_by_preset(make_spec):
    names = {preset: [array.name for array in array_schemas(make_spec(preset=preset))] for preset in PRESETS}
    assert names == {
        "lossless": ["aux_planes", "last_planes", "tokens"],
        "near": ["aux_codes", "last_codes", "tokens", "exceptions"],
        "compact": ["aux_codes", "last_codes", "tokens", "exceptions"],
        "small": ["aux_codes", "topk", "tokens", "exceptions"],
        "tiny": ["aux_pairs", "topk", "tokens", "exceptions"],
    }


def test_raw_bytes_are_those_of_bfloat16(make_spec):
    assert raw_bytes(make_spec(), num_tokens=10, num_targets=4) == 10 * (3 * 8 * 2 + 5) + 4 * (8 * 2 + 8)


def test_impossible_arrays_do_not_exist(make_spec):
    for codec, level in (("zstd", 3), ("blosc", 5), ("raw", 0)):
        for preset in PRESETS.values():
            encoding: Encoding = dataclasses.replace(preset, codec=codec, level=level)
            for array in array_schemas(make_spec(encoding=encoding, vocab_size=1000)):
                assert array.shard_rows % array.chunk_rows == 0
                assert all(row % chunk == 0 for row, chunk in zip(array.row_shape, array.chunk_row_shape, strict=True))
