"""Specs that cannot be: each refused with the field and its value."""

from __future__ import annotations

import pytest

from storage.errors import StoreError


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
        ({"codec": "zip"}, "codec 'zip' is unknown; use one of lossless, raw"),
        ({"shard_tokens": 10}, "shard_tokens 10 must be a multiple of chunk_tokens 4"),
    ],
)
def test_impossible_specs_are_refused(make_spec, changes, message):
    # Red when a field loses its check or its message the value.
    with pytest.raises(StoreError, match=message):
        make_spec(**changes)
