"""The code of a value: its error bound in exact arithmetic, its exceptions, and the statistics behind it."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from storage.calibration import SINK_NORM, Statistics, calibrate, code_constants
from storage.errors import StoreError
from storage.quantise import Quantised, dequantise, lossless, quantise
from storage.schema import StoreSpec

EVERY_BF16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
NO_SINKS = np.zeros(1, dtype=np.float32)


def floats(bits: np.ndarray) -> np.ndarray:
    """bf16 bits as float64."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bits_of(values: np.ndarray) -> np.ndarray:
    """bf16 bits of values that are bf16 numbers, or nearly."""
    return (np.asarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def coded(bits: np.ndarray, scale: np.ndarray, offset: np.ndarray, norm: np.ndarray = NO_SINKS) -> Quantised:
    """One layer's rows [N, D]."""
    return quantise(bits[:, None], scale=scale[None], offset=offset[None], norm=norm)


def assert_bound(bits: np.ndarray, quantised: Quantised) -> None:
    """Every value that is no exception is within half a scale, in rational arithmetic; exceptions are exact."""
    got = dequantise(quantised)
    flat_bits, flat_got = bits.reshape(-1), got.reshape(-1)
    exact = np.zeros(flat_bits.size, dtype=bool)
    exact[quantised.exception_at] = True
    np.testing.assert_array_equal(flat_got[exact], flat_bits[exact])
    assert np.isfinite(floats(flat_bits[~exact])).all()
    scales = np.broadcast_to(quantised.scale, got.shape).reshape(-1)[~exact].astype(np.float64)
    left, right = floats(flat_got[~exact]), floats(flat_bits[~exact])
    error = np.abs(left - right)
    assert (error <= scales / 2).all()
    # float64 may have rounded the differences: the closest to the bound once more, without any rounding.
    for at in np.argsort(scales / 2 - error)[:200]:
        assert abs(Fraction(left[at]) - Fraction(right[at])) <= Fraction(scales[at]) / 2


@pytest.mark.parametrize("step", [0.05, 0.1, 0.3, 0.8])
@pytest.mark.parametrize(
    ("mean", "std"), [(0.0, 1.0), (0.3, 1.0), (-7.1, 0.9), (431.7, 3.3), (1e-30, 1e-31), (0.0, 1e30)]
)
def test_every_bfloat16_is_within_half_a_step_or_exact(step, mean, std):
    # Red when a value that rounding to bfloat16 carries past the bound is not an exception, or NaN and Inf are not.
    scale, offset = code_constants(np.array([mean], np.float32), np.array([std], np.float32), step)
    assert Fraction(float(scale[0])) <= Fraction(step) * Fraction(float(np.float32(std)))
    bits = EVERY_BF16[:, None]
    quantised = coded(bits, scale, offset)
    assert_bound(bits, quantised)
    # Not by making everything an exception.
    near = np.abs(floats(bits[:, 0]) - mean) <= 2 * std
    assert np.isin(np.flatnonzero(near), quantised.exception_at).mean() < 0.05


@settings(max_examples=60, deadline=None)
@given(
    bits=hnp.arrays(np.uint16, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9)),
    step=st.floats(2**-10, 8),
    log_std=st.floats(-80, 80),
    mean=st.floats(-(2.0**66), 2.0**66, width=32),
)
def test_any_bits_under_any_statistics_keep_the_bound(bits, step, log_std, mean):
    width = bits.shape[1]
    std = np.full(width, 2.0**log_std, dtype=np.float32)
    scale, offset = code_constants(np.full(width, mean, dtype=np.float32), std, step)
    assert (scale > 0).all()
    assert (scale.astype(np.float64) <= std.astype(np.float64) * step).all()
    assert_bound(bits, coded(bits, scale, offset))


def test_decoding_is_two_float32_roundings_and_one_to_even():
    # Red when multiply and add are fused, done in float64, or ties are not rounded to even: then no GPU agrees.
    rng = np.random.default_rng(0)
    scale = rng.uniform(1e-3, 1, 257).astype(np.float32)
    offset = rng.uniform(-3, 3, 257).astype(np.float32)
    codes = rng.integers(-127, 128, (300, 257)).astype(np.int8)
    got = dequantise(Quantised(codes, scale, offset, np.empty(0, np.int64), np.empty(0, np.uint16)))
    product = np.float32(codes.astype(np.float32) * scale)
    value = np.float32(product + offset)
    down = (value.view(np.uint32) >> 16).astype(np.uint32)
    low, high = (down << 16).view(np.float32).astype(np.float64), ((down + 1) << 16).view(np.float32).astype(np.float64)
    to_low, to_high = np.abs(value - low), np.abs(high - value)
    want = np.where((to_low < to_high) | ((to_low == to_high) & (down % 2 == 0)), down, down + 1)
    np.testing.assert_array_equal(got, want.astype(np.uint16))
    tie = Quantised(np.array([[1], [3]], np.int8), np.float32([2**-8]), np.float32([1.0]), got[:0, 0], got[:0, 0])
    np.testing.assert_array_equal(floats(dequantise(tie))[:, 0], [1.0, 1 + 2**-6])  # both ties; 1 + 3 * 2^-8 goes up


def test_the_grid_leaves_few_exceptions():
    # Red when scale or offset leave the bfloat16 grid: 1.2% of the values at step 0.1 then miss the bound by rounding.
    rng = np.random.default_rng(1)
    bits = bits_of(rng.standard_normal((4000, 64)))
    scale, offset = code_constants(np.zeros(64, np.float32), np.ones(64, np.float32), 0.1)
    assert len(coded(bits, scale, offset).exception_at) < 0.003 * bits.size


def test_sinks_are_exact_and_cost_no_other_row(make_spec):
    rng = np.random.default_rng(2)
    bits = bits_of(rng.standard_normal((50, 3, 8)))
    bits[7, 1] = bits_of(rng.standard_normal(8) * 100)
    norm = np.full(3, np.sqrt(8), dtype=np.float32)
    ones, zeros = np.ones((3, 8), np.float32), np.zeros((3, 8), np.float32)
    quantised = quantise(bits, scale=0.1 * ones, offset=zeros, norm=norm)
    row = 7 * 24 + 8 + np.arange(8)
    assert np.isin(row, quantised.exception_at).all()
    np.testing.assert_array_equal(dequantise(quantised).reshape(bits.shape)[7, 1], bits[7, 1])
    assert (quantised.codes.reshape(50, 3, 8)[7, 1] == 0).all()
    assert len(quantised.exception_at) < 8 + 0.05 * bits.size
    # A norm of 0 (nothing was calibrated) makes no row a sink.
    assert len(quantise(bits, scale=100 * ones, offset=zeros, norm=0 * norm).exception_at) == 0


def test_a_small_alphabet_holds_the_bound_too():
    bits = bits_of(np.random.default_rng(3).standard_normal((500, 16)) * 3)
    scale = np.full(16, 0.8, np.float32)
    quantised = quantise(
        bits[:, None], scale=scale[None], offset=np.zeros((1, 16), np.float32), norm=NO_SINKS, largest=7
    )
    assert np.abs(quantised.codes).max() == 7
    assert_bound(bits, quantised)


@settings(max_examples=50, deadline=None)
@given(bits=hnp.arrays(np.uint16, hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=6)))
def test_lossless_is_the_bits(bits):
    np.testing.assert_array_equal(dequantise(lossless(bits)), bits)
    out = np.empty_like(bits)
    assert dequantise(lossless(bits), out=out) is out
    np.testing.assert_array_equal(out, bits)


def test_rows_of_a_quantised_array_decode_to_its_rows():
    rng = np.random.default_rng(4)
    bits = bits_of(rng.standard_cauchy((40, 6)))
    quantised = coded(bits, np.full(6, 0.02, np.float32), np.zeros(6, np.float32))
    assert len(quantised.exception_at) > 10
    whole = dequantise(quantised)
    for start, stop in [(0, 40), (3, 17), (39, 40), (5, 5)]:
        np.testing.assert_array_equal(dequantise(quantised.rows(start, stop)), whole[start:stop])


def test_no_rows_at_all():
    quantised = coded(np.empty((0, 5), np.uint16), np.ones(5, np.float32), np.zeros(5, np.float32))
    assert quantised.codes.shape == (0, 5)
    assert dequantise(quantised).shape == (0, 5)


def test_statistics_are_those_of_all_rows_but_sinks(make_spec, make_sample):
    # Red when sums lose digits, a sink or an overflowed token is counted in, or layers are mixed.
    spec = make_spec(preset="near")
    samples = [make_sample(f"s{i}", 40, spec) for i in range(5)]
    aux = np.concatenate([sample.aux_hidden for sample in samples])
    for layer, token in ((0, 3), (2, 11)):
        samples[0].aux_hidden[token, layer] = bits_of(np.full(8, 1e4))
        aux[token, layer] = samples[0].aux_hidden[token, layer]
    statistics = calibrate(samples, spec)
    for layer in range(3):
        values = floats(aux[:, layer])
        norms = np.linalg.norm(values, axis=1)
        assert statistics.aux_norm[layer] == pytest.approx(np.median(norms), rel=1e-6)
        kept = values[norms <= SINK_NORM * np.median(norms)]
        assert len(kept) == len(values) - (layer != 1)
        np.testing.assert_allclose(statistics.aux_mean[layer], kept.mean(axis=0), rtol=1e-6)
        np.testing.assert_allclose(statistics.aux_std[layer], kept.std(axis=0), rtol=1e-6)
    last = floats(np.concatenate([sample.last_hidden for sample in samples]))
    np.testing.assert_allclose(statistics.last_std, last.std(axis=0), rtol=1e-6)
    assert statistics.calibration_tokens == 200


def test_overflowed_tokens_do_not_spoil_the_statistics(make_spec, make_sample):
    spec = make_spec(preset="near")
    sample = make_sample("a", 60, spec)
    clean = calibrate([sample], spec)
    bits = np.concatenate(
        [sample.aux_hidden, np.full((2, 3, 8), 0x7F80, np.uint16), np.full((1, 3, 8), 0x7FC1, np.uint16)]
    )
    more = dataclasses.replace(sample, aux_hidden=bits, token_ids=np.zeros(63, np.int32))
    np.testing.assert_array_equal(calibrate([more], spec).aux_mean, clean.aux_mean)
    np.testing.assert_array_equal(calibrate([more], spec).aux_std, clean.aux_std)


def test_a_channel_that_never_moved_gets_a_floor(make_spec, make_sample):
    # Red when its scale becomes 0: every value of it would be an exception, or a division by zero.
    spec = make_spec(preset="near")
    sample = make_sample("a", 100, spec)
    sample.aux_hidden[:, 1, 4] = bits_of(np.array(2.5))
    sample.last_hidden[:, 0] = 0
    statistics = calibrate([sample], spec)
    assert statistics.aux_mean[1, 4] == 2.5
    assert statistics.aux_std[1, 4] == pytest.approx(2**-10 * np.median(statistics.aux_std[1]), rel=0.2)
    assert (statistics.aux_scale > 0).all()
    quantised = quantise(
        sample.aux_hidden, scale=statistics.aux_scale, offset=statistics.aux_offset, norm=statistics.aux_norm
    )
    assert not (quantised.exception_at % 24 == 12).any()
    np.testing.assert_array_equal(dequantise(quantised).reshape(100, 3, 8)[:, 1, 4], sample.aux_hidden[:, 1, 4])


def test_states_that_are_all_zero_have_statistics(make_spec, make_sample):
    spec = make_spec(preset="near")
    sample = make_sample("a", 30, spec)
    sample.aux_hidden[...] = 0
    statistics = calibrate([sample], spec)
    assert (statistics.aux_std > 0).all()
    moved = np.full((2, 3, 8), 0x3F80, np.uint16)
    quantised = quantise(moved, scale=statistics.aux_scale, offset=statistics.aux_offset, norm=statistics.aux_norm)
    np.testing.assert_array_equal(dequantise(quantised).reshape(moved.shape), moved)


def test_without_a_row_there_still_are_statistics(make_spec):
    statistics = calibrate([], make_spec(preset="near"))
    assert (statistics.aux_std == 1).all()
    assert statistics.aux_norm.tolist() == [0, 0, 0]


@pytest.mark.parametrize("preset", ["lossless", "near", "small", "tiny"])
def test_statistics_survive_being_stored(make_spec, make_sample, preset):
    spec: StoreSpec = make_spec(preset=preset)
    statistics = calibrate([make_sample("a", 50, spec)], spec)
    arrays = statistics.arrays()
    assert tuple(arrays) == Statistics.array_names(spec)
    again = Statistics.of_arrays(arrays, spec)
    for field in dataclasses.fields(Statistics):
        np.testing.assert_array_equal(getattr(again, field.name), getattr(statistics, field.name))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("aux_mean", np.zeros((3, 7), np.float32), r"aux_mean are float32 \[3, 7\], not float32 \[3, 8\]"),
        ("aux_mean", np.zeros((3, 8)), r"aux_mean are float64"),
        ("last_scale", np.zeros(8, np.float32), "last_scale hold values that no calibration gives"),
        ("aux_offset", np.full((3, 8), np.nan, np.float32), "aux_offset hold values"),
        ("aux_norm", None, "aux_norm, aux_offset"),
    ],
)
def test_statistics_that_cannot_be_are_refused(make_spec, make_sample, name, value, message):
    spec = make_spec(preset="near")
    arrays = calibrate([make_sample("a", 50, spec)], spec).arrays()
    if value is None:
        del arrays[name]
    else:
        arrays[name] = value
    with pytest.raises(StoreError, match=message):
        Statistics.of_arrays(arrays, spec)
