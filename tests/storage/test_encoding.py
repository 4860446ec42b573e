"""A sample to named arrays and back: bit-exact where it says so, within the bound elsewhere, windows like the whole."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from storage.encoding import (
    EncodedSample,
    bridges,
    decode_sample,
    encode_sample,
    encoded_states,
    escaped_values,
    round_trip,
)
from storage.errors import StoreError
from storage.presets import PRESETS
from storage.quantise import Quantised, calibrate, dequantise
from storage.schema import Sample, TopK, array_schemas, target_rows, target_window
from storage.validate import validate_sample

LOSSLESS = [dataclasses.replace(PRESETS["lossless"], codec=codec, level=level) for codec, level in
            (("zstd", 1), ("zstd", 7), ("blosc", 1), ("raw", 0))]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    encoding=st.sampled_from(LOSSLESS),
    aux=hnp.arrays(np.uint16, st.tuples(st.integers(1, 12), st.just(3), st.integers(1, 7))),
    data=st.data(),
)
def test_lossless_is_exact_for_every_bit_pattern(make_spec, assert_same, encoding, aux, data):
    # NaN payloads, subnormals, -0.0 and Inf are bits like all others. Red when any of them is normalised on the way.
    num_tokens, _, hidden = aux.shape
    spec = make_spec(encoding=encoding, hidden_size=hidden)
    mask = data.draw(hnp.arrays(np.bool_, num_tokens))
    rows = len(target_rows(mask))
    sample = Sample(
        sample_id="any",
        token_ids=data.draw(hnp.arrays(np.int32, num_tokens)),
        loss_mask=mask,
        aux_hidden=aux,
        target_argmax=data.draw(hnp.arrays(np.int32, rows)),
        target_lse=data.draw(hnp.arrays(np.uint32, rows)).view(np.float32),
        last_hidden=data.draw(hnp.arrays(np.uint16, (rows, hidden))),
    )
    stored = {}
    for array in array_schemas(spec):
        values = encode_sample(sample, spec, None)[array.name]
        assert values.dtype == array.dtype
        assert values.shape[1:] == array.row_shape
        stored[array.name] = np.empty_like(values)
        if values.size:
            array.codec.decode(array.codec.encode(values), stored[array.name])
    assert_same(decode_sample(stored, sample_id="any", spec=spec, statistics=None), sample)


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("hidden_size", [8, 7])
def test_every_preset_comes_back(make_spec, make_sample, assert_same, preset, hidden_size):
    spec = make_spec(preset=preset, hidden_size=hidden_size)
    samples = [make_sample(f"s{i}", 30 + i, spec) for i in range(4)]
    statistics = calibrate(samples, spec)
    for sample in samples:
        validate_sample(sample, spec)
        arrays = encode_sample(sample, spec, statistics)
        assert list(arrays) == [array.name for array in array_schemas(spec)]
        for array in array_schemas(spec):
            assert arrays[array.name].dtype == array.dtype
            assert arrays[array.name].shape[1:] == array.row_shape
            assert arrays[array.name].flags.c_contiguous
        again = decode_sample(arrays, sample_id=sample.sample_id, spec=spec, statistics=statistics)
        validate_sample(again, spec)
        assert_same(again, round_trip(sample, spec, statistics))
        for name in ("token_ids", "loss_mask", "target_argmax", "target_lse"):
            assert getattr(again, name).tobytes() == getattr(sample, name).tobytes()
        step = spec.encoding.aux_step
        if step is not None:
            bound = step / 2 * statistics.aux_std.astype(np.float64)
            error = np.abs(_floats(again.aux_hidden) - _floats(sample.aux_hidden))
            assert (error <= bound).all()
            assert escaped_values(arrays) < 0.2 * sample.aux_hidden.size


def test_what_was_decoded_is_stored_like_what_it_came_from(make_spec, make_sample, assert_same):
    # An online run trains on the round trip and a later one on the store; a converted store must not drift further.
    spec = make_spec(preset="near")
    samples = [make_sample(f"s{i}", 60, spec) for i in range(3)]
    statistics = calibrate(samples, spec)
    once = round_trip(samples[0], spec, statistics)
    assert_same(round_trip(once, spec, statistics), once)


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_window_is_a_part_of_the_whole(make_spec, make_sample, preset):
    # Red when exceptions, target rows or channels are counted from another row than the window's.
    spec = make_spec(preset=preset)
    sample = make_sample("a", 25, spec)
    sample.aux_hidden[0] = 0x7000  # a sink, so that each lossy window at the start has exceptions
    statistics = calibrate([sample], spec)
    arrays = encode_sample(sample, spec, statistics)
    whole = encoded_states(arrays, sample_id="a", spec=spec, statistics=statistics)
    assert (whole.start, whole.stop) == (0, 25)
    axes = {array.name: array.axis for array in array_schemas(spec)}
    for start in range(25):
        for stop in range(start + 1, 26):
            first, last = target_window(sample.loss_mask, start, stop)
            cut = {
                name: values if name in ("tokens", "exceptions")
                else values[start:stop] if axes[name] == "tokens" else values[first:last]
                for name, values in arrays.items()
            }  # fmt: skip
            got = encoded_states(cut, sample_id="a", spec=spec, statistics=statistics, start=start, stop=stop)
            assert (got.start, got.stop) == (start, stop)
            np.testing.assert_array_equal(got.loss_mask, sample.loss_mask[start:stop])
            np.testing.assert_array_equal(got.target_lse, sample.target_lse[first:last])
            np.testing.assert_array_equal(got.target_argmax, sample.target_argmax[first:last])
            np.testing.assert_array_equal(dequantise(got.aux), dequantise(whole.aux)[start:stop])
            for left, right in zip(_target(got), _target(whole), strict=True):
                np.testing.assert_array_equal(left, right[first:last])
            assert len(got.target_argmax) == len(target_rows(got.loss_mask))


def test_lossless_states_beside_coded_ones(make_spec, make_sample, assert_same):
    # Exceptions are numbered over both arrays, whichever of them has any.
    for changes in ({"aux_step": None}, {"last_step": None}):
        spec = make_spec(encoding=dataclasses.replace(PRESETS["near"], **changes))
        sample = make_sample("a", 40, spec)
        sample.last_hidden[3] = 0x7000
        statistics = calibrate([sample], spec)
        again = round_trip(sample, spec, statistics)
        name = "aux_hidden" if "aux_step" in changes else "last_hidden"
        np.testing.assert_array_equal(getattr(again, name), getattr(sample, name))
        np.testing.assert_array_equal(again.last_hidden[3], sample.last_hidden[3])


def test_a_sample_without_a_target_row(make_spec, make_sample, assert_same):
    for preset in PRESETS:
        spec = make_spec(preset=preset)
        statistics = calibrate([make_sample("b", 40, spec)], spec)
        sample = make_sample("a", 1, spec)
        again = round_trip(sample, spec, statistics)
        assert again.target_lse.shape == (0,)
        assert again.token_ids.tolist() == sample.token_ids.tolist()
        if spec.encoding.lossless:
            assert_same(again, sample)


def test_sinks_that_are_the_same_in_every_sample_cost_nothing(make_spec, make_sample):
    # Red when the first token's states, the same in all samples, are stored in each.
    def large(bits: np.ndarray) -> np.ndarray:
        return bits & 0x80FF | 0x4600

    spec = make_spec(preset="near", hidden_size=256)
    samples = [make_sample(f"s{i}", 60, spec) for i in range(3)]
    for sample in samples:
        sample.aux_hidden[0] = large(samples[0].aux_hidden[0])
        sample.last_hidden[2] = large(samples[0].last_hidden[2])
    statistics = calibrate(samples, spec)
    np.testing.assert_array_equal(statistics.aux_sink, samples[0].aux_hidden[0])
    for sample in samples:
        sample.aux_hidden[1, 1] = large(sample.aux_hidden[1, 1])  # another sink, of this sample alone
        arrays = encode_sample(sample, spec, statistics)
        flagged = arrays["exceptions"][:, 1] >= 1 << 16
        assert flagged.sum() == 5 * 256
        assert (arrays["exceptions"][:768, 1] == 1 << 16).all()
        again = decode_sample(arrays, sample_id=sample.sample_id, spec=spec, statistics=statistics)
        np.testing.assert_array_equal(again.aux_hidden[0], sample.aux_hidden[0])
        np.testing.assert_array_equal(again.aux_hidden[1, 1], sample.aux_hidden[1, 1])
        np.testing.assert_array_equal(again.last_hidden[2], sample.last_hidden[2])


@pytest.mark.parametrize(
    ("positions", "largest", "added"),
    [
        ([], 10, []),
        ([10], 10, []),
        ([11], 10, [10]),
        ([35], 10, [10, 20, 30]),
        ([5, 15, 40, 41], 10, [25, 35]),
        ([0, 21], 10, [10, 20]),
    ],
)
def test_wide_distances_are_bridged(positions, largest, added):
    # Only samples of 2^32 elements need it: 262,144 tokens at D = 4,096.
    got = bridges(np.array(positions, dtype=np.int64), largest=largest)
    assert got.tolist() == added
    together = np.sort(np.concatenate([positions, got]))
    assert (np.diff(together, prepend=0) <= largest).all()


def test_bridged_exceptions_decode(make_spec, make_sample, assert_same, monkeypatch):
    spec = make_spec(preset="near")
    sample = make_sample("a", 40, spec)
    statistics = calibrate([sample], spec)
    want = round_trip(sample, spec, statistics)
    monkeypatch.setattr("storage.encoding._LARGEST_GAP", 50)
    monkeypatch.setattr(bridges, "__kwdefaults__", {"largest": 50})
    arrays = encode_sample(sample, spec, statistics)
    assert arrays["exceptions"][:, 0].max() <= 50
    got = decode_sample(arrays, sample_id="a", spec=spec, statistics=statistics)
    exact = (got.aux_hidden == sample.aux_hidden) & (got.aux_hidden != want.aux_hidden)
    assert exact.any()
    np.testing.assert_array_equal(np.where(exact, want.aux_hidden, got.aux_hidden), want.aux_hidden)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("aux_codes", lambda rows: rows[:-1], "sample a: aux_codes has 39 rows where 40 are due"),
        ("last_codes", lambda rows: rows[1:], "sample a: last_codes has"),
        ("exceptions", lambda rows: np.array([[5, 1 << 17]], np.uint32), "sample a: exceptions is damaged"),
        ("exceptions", lambda rows: np.array([[5, 1], [0, 1]], np.uint32), "sample a: exceptions is damaged"),
        ("exceptions", lambda rows: np.array([[1 << 20, 1]], np.uint32), "it names element 1048576 of"),
        ("exceptions", lambda rows: np.full((3, 2), 0xFFFFFFFF, np.uint32), "sample a: exceptions is damaged"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(make_spec, make_sample, name, change, message):
    spec = make_spec(preset="near")
    sample = make_sample("a", 40, spec)
    statistics = calibrate([sample], spec)
    arrays = encode_sample(sample, spec, statistics)
    with pytest.raises(StoreError, match=message):
        decode_sample({**arrays, name: change(arrays[name])}, sample_id="a", spec=spec, statistics=statistics)


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (0, 41), (7, 7), (9, 3)])
def test_a_window_outside_the_sample_is_refused(make_spec, make_sample, start, stop):
    spec = make_spec()
    arrays = encode_sample(make_sample("a", 40, spec), spec, None)
    with pytest.raises(StoreError, match=f"window {start} to {stop} is not within its 40 tokens"):
        encoded_states(arrays, sample_id="a", spec=spec, statistics=None, start=start, stop=stop)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_id": "../a"}, "sample id '../a'"),
        ({"token_ids": np.empty(0, np.int32)}, "sample a has no tokens"),
        ({"token_ids": np.full(40, 50, np.int32)}, "token_ids spans 50 to 50, the target's vocabulary has 50"),
        ({"loss_mask": np.ones(40, np.int8)}, "loss_mask is int8"),
        ({"aux_hidden": np.zeros((40, 24), np.uint16)}, r"aux_hidden is uint16 \[40, 24\], the store needs"),
        ({"aux_hidden": np.full((40, 3, 8), 0x7FC0, np.uint16)}, "aux_hidden holds NaN or Inf in 40 rows of 40 tokens"),
        ({"target_lse": np.zeros(40, np.float32)}, "target_lse is float32"),
        ({"last_hidden": None}, "the store needs last_hidden, and no top_k"),
    ],
)
def test_samples_that_cannot_be_are_refused(make_spec, make_sample, change, message):
    spec = make_spec(preset="near")
    with pytest.raises(StoreError, match=message):
        validate_sample(dataclasses.replace(make_sample("a", 40, spec), **change), spec)


def test_top_k_that_cannot_be_is_refused(make_spec, make_sample):
    spec = make_spec(preset="small")
    sample = make_sample("a", 40, spec)
    assert sample.top_k is not None
    ids, log_probabilities = sample.top_k.ids, sample.top_k.log_probabilities
    for top_k, message in (
        (TopK(np.zeros_like(ids), log_probabilities), "top_k.ids names a token twice in a row"),
        (TopK(ids, log_probabilities * 0), "sum to a mass of 5.0000 in a row"),
        (TopK(ids, log_probabilities * np.float32("nan")), "top_k.log_probabilities holds NaN or Inf"),
        (TopK(ids + 50, log_probabilities), "top_k.ids spans"),
        (TopK(ids[:, :3], log_probabilities), r"top_k.ids is int32"),
        (None, "the store needs top_k, and no last_hidden"),
    ):
        with pytest.raises(StoreError, match=f"sample a: .*{message}"):
            validate_sample(dataclasses.replace(sample, top_k=top_k), spec)


def test_bytes_for_the_gpu_are_half_of_bfloat16(make_spec, make_sample):
    spec = make_spec(preset="near", hidden_size=64)
    sample = make_sample("a", 200, spec)
    statistics = calibrate([sample], spec)
    arrays = encode_sample(sample, spec, statistics)
    encoded = encoded_states(arrays, sample_id="a", spec=spec, statistics=statistics)
    assert encoded.nbytes < 0.53 * (sample.aux_hidden.nbytes + sample.last_hidden.nbytes)


def _target(encoded: EncodedSample) -> list[np.ndarray]:
    if isinstance(encoded.last, Quantised):
        return [dequantise(encoded.last)]
    return [encoded.last.ids, encoded.last.log_probabilities]


def _floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
