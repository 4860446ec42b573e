"""Hidden states in steps of their channels' standard deviations, and exactly where that does not fit.

A value x of channel c becomes an int8 code, and comes back as

    code  = round((x - offset_c) / scale_c)
    value = bfloat16(float32(code) * scale_c + offset_c)      two roundings in float32, no fused multiply-add, then one
                                                              to the nearest bfloat16, ties to even

with scale_c just under step * std_c and offset_c next to mean_c, frozen from the first samples of a segment: no
groups, no scales a token, int8 all the way to the GPU. What does not fit is an *exception*, kept as its bfloat16 bits
beside the codes (its code is 0):

* |code| > 127 (or > 7, see storage.forms), NaN, Inf;
* every value of a *sink*: a token whose norm is over 5 x the layer's median. The first token of a document reaches
  25,000 where others reach 150; a static scale destroys it, and with it the model's attention. 0.1% of the values;
* a value whose error would otherwise exceed the bound.

The bound: |value - x| <= scale_c / 2 <= step * std_c / 2 for every value, in exact arithmetic. Rounding to a code costs
at most that, but rounding the result to bfloat16 may carry it further, by half a bfloat16 ulp: with scale = step * std
that made 1-2% of all values exceptions, and the store 4-7% larger. So scale and offset are multiples of one power of
two, g: wherever |x| is below 256 g, the codes' values then are bfloat16 numbers already, and nothing is rounded. The
smaller scale costs 0.5-2%, less than it saves.

Numpy, torch and Triton (kernels.dequantize) agree bit for bit. Without a step (lossless) codes are the bits themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import StoreError
from storage.forms import LARGEST_CODE
from storage.schema import NUM_AUX_LAYERS, Sample, StoreSpec

SINK_NORM = 5.0
# See `code_constants`. Bits of an exception: 20 of its own (2.5 bytes, measured), less those of the code it replaces.
_SCALE_BITS = range(1, 8)
_EXCEPTION_BITS = 17.0
# Bytes of float32 scratch a block: it stays in a core's second-level cache, where each pass runs at ~10 GB/s.
_BLOCK_BYTES = 1 << 18
# Channels that (almost) never move would get a scale of 0. A thousandth of the layer's median is no loss to anybody.
_SMALLEST_RELATIVE_STD = 2.0**-10
_SMALLEST_STD = 2.0**-100


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """What a segment's codes are relative to; frozen when its first samples were written."""

    aux_mean: npt.NDArray[np.float32]
    """float32 [3, D]: mean of each channel of each layer, sinks left out."""
    aux_std: npt.NDArray[np.float32]
    """float32 [3, D], > 0: standard deviation likewise, at least 2^-10 of the layer's median."""
    aux_norm: npt.NDArray[np.float32]
    """float32 [3]: median of the layer's token norms, what sinks are told by."""
    aux_scale: npt.NDArray[np.float32]
    """float32 [3, D], > 0: scales of the codes, see `code_constants`; ones when lossless."""
    aux_offset: npt.NDArray[np.float32]
    """float32 [3, D]: their offsets; zeros when lossless."""
    last_mean: npt.NDArray[np.float32]
    """float32 [D]; zeros when the store keeps no last hidden states."""
    last_std: npt.NDArray[np.float32]
    """float32 [D], > 0; ones likewise."""
    last_norm: npt.NDArray[np.float32]
    """float32 []; zero likewise."""
    last_scale: npt.NDArray[np.float32]
    """float32 [D], > 0; ones likewise, and when lossless."""
    last_offset: npt.NDArray[np.float32]
    """float32 [D]; zeros likewise."""
    calibration_tokens: int
    """Tokens that the auxiliary statistics come from."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Every field as an array (float32, calibration_tokens int64 []), as a segment stores them."""
        return {field.name: np.asarray(getattr(self, field.name)) for field in fields(self)}

    @staticmethod
    def array_names(spec: StoreSpec) -> tuple[str, ...]:
        """Names of `arrays()`, for a store whose encoding needs statistics."""
        return tuple(_shapes(spec))

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], spec: StoreSpec) -> Statistics:
        """Undo `arrays()`. StoreError if a name, shape or dtype is wrong or a value cannot be a statistic."""
        shapes = _shapes(spec)
        if set(arrays) != set(shapes):
            raise StoreError(f"statistics are {', '.join(sorted(arrays))}; {', '.join(sorted(shapes))} are due")
        for name, shape in shapes.items():
            values = arrays[name]
            dtype = np.dtype(np.int64 if name == "calibration_tokens" else np.float32)
            if values.shape != shape or values.dtype != dtype:
                raise StoreError(
                    f"statistics {name} are {values.dtype} {list(values.shape)}, not {dtype} {list(shape)}"
                )
            if not np.isfinite(values).all() or (name.endswith(("_std", "_scale")) and not (values > 0).all()):
                raise StoreError(f"statistics {name} hold values that no calibration gives")
        return cls(
            **{name: values for name, values in arrays.items() if name != "calibration_tokens"},
            calibration_tokens=int(arrays["calibration_tokens"]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """An array of N rows and C channels in stored form (aux: C = 3 D, last: C = D)."""

    codes: npt.NDArray[np.int8] | npt.NDArray[np.uint16]
    """int8 [N, C], or bf16 bits as uint16 [N, C] when lossless."""
    scale: npt.NDArray[np.float32] | None
    """float32 [C]; None when lossless."""
    offset: npt.NDArray[np.float32] | None
    """float32 [C]; None when lossless."""
    exception_at: npt.NDArray[np.int64]
    """int64 [E]: flat positions in `codes`, ascending."""
    exception_bits: npt.NDArray[np.uint16]
    """uint16 [E]: their bf16 bits."""

    def rows(self, start: int, stop: int) -> Quantised:
        """Rows `start` to `stop`, as views."""
        width = self.codes.shape[1]
        first, last = np.searchsorted(self.exception_at, [start * width, stop * width])
        return Quantised(
            codes=self.codes[start:stop],
            scale=self.scale,
            offset=self.offset,
            exception_at=self.exception_at[first:last] - start * width,
            exception_bits=self.exception_bits[first:last],
        )


def calibrate(samples: Iterable[Sample], spec: StoreSpec) -> Statistics:
    """Statistics of the samples given: all of them are held, so give as many tokens as are worth it (16K are plenty).

    Sums in float64; sinks and tokens with NaN or Inf left out. Without a row to learn from: mean 0, std 1, norm 0.
    """
    held = list(samples)
    layers = [_moments([sample.aux_hidden[:, layer] for sample in held], spec) for layer in range(NUM_AUX_LAYERS)]
    aux_mean, aux_std, aux_norm = (np.stack(parts) for parts in zip(*layers, strict=True))
    last = [sample.last_hidden for sample in held if sample.last_hidden is not None]
    last_mean, last_std, last_norm = _moments(last, spec)
    aux_scale, aux_offset = code_constants(aux_mean, aux_std, spec.encoding.aux_step)
    last_scale, last_offset = code_constants(last_mean, last_std, spec.encoding.last_step)
    return Statistics(
        aux_mean=aux_mean,
        aux_std=aux_std,
        aux_norm=aux_norm,
        aux_scale=aux_scale,
        aux_offset=aux_offset,
        last_mean=last_mean,
        last_std=last_std,
        last_norm=last_norm,
        last_scale=last_scale,
        last_offset=last_offset,
        calibration_tokens=sum(sample.token_ids.size for sample in held),
    )


def code_constants(
    mean: npt.NDArray[np.float32], std: npt.NDArray[np.float32], step: float | None
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Scale and offset, float32 of the same shape, of the codes of channels with that mean and std.

    scale is the largest multiple of g that is not above step * std, offset the nearest to mean; g is the power of two
    from step * std / 2 to step * std / 128 for which a value is expected to cost the fewest bits: a small g leaves more
    values to be rounded to bfloat16, some of them past the bound; a large one makes scale smaller than it need be.
    """
    if step is None:
        return np.ones_like(mean), np.zeros_like(mean)
    exact = std.astype(np.float64) * step
    center = mean.astype(np.float64)
    exponent = np.frexp(exact)[1]
    best = np.full(mean.shape, np.inf)
    scale, offset = np.empty_like(best), np.empty_like(best)
    for bits in _SCALE_BITS:
        g = np.ldexp(1.0, exponent - bits)
        tried = np.floor(exact / g) * g
        cost = np.log2(exact / tried) + _EXCEPTION_BITS * _expected_exceptions(center, std, tried, g)
        better = cost < best
        best = np.where(better, cost, best)
        scale = np.where(better, tried, scale)
        offset = np.where(better, np.rint(center / g) * g, offset)
    return scale.astype(np.float32), offset.astype(np.float32)


def _expected_exceptions(
    mean: npt.NDArray[np.float64],
    std: npt.NDArray[np.float32],
    scale: npt.NDArray[np.float64],
    g: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Share of a normal channel's values that rounding to bfloat16 carries past scale / 2.

    Only where a bfloat16 ulp u is above g (or the codes' values are bfloat16 already) and below scale (or rounding
    finds the value itself). There the codes' values lie n or n + 1 ulps apart, n = floor(scale / u), and a bfloat16 in
    the very middle of a wide even gap is lost: about u / (4 scale) of all.
    """
    share = np.zeros(mean.shape)
    for doublings in range(1, _SCALE_BITS[-1] + 1):
        ulp = np.ldexp(g, doublings)
        low, high = 128 * ulp, 256 * ulp
        positive = _below(high, mean, std) - _below(low, mean, std)
        negative = _below(-low, mean, std) - _below(-high, mean, std)
        share += np.where(ulp < scale, (positive + negative) * ulp / (4 * scale), 0.0)
    return share


def _below(
    value: npt.NDArray[np.float64], mean: npt.NDArray[np.float64], std: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """The normal distribution function, by the logistic one (within 0.01)."""
    return 0.5 + 0.5 * np.tanh(0.851 * (value - mean) / std)


def quantise(
    bits: npt.NDArray[np.uint16],
    *,
    scale: npt.NDArray[np.float32],
    offset: npt.NDArray[np.float32],
    norm: npt.NDArray[np.float32],
    largest: int = LARGEST_CODE,
) -> Quantised:
    """Code rows of bf16 bits.

    bits uint16 [N, G, D] of G layers; scale (> 0), offset float32 [G, D]; norm float32 [G], 0 for no sinks. largest:
    the largest code there may be. Codes come as int8 [N, G D].
    """
    num_rows, num_layers, hidden = bits.shape
    width = num_layers * hidden
    scale, offset = scale.reshape(-1), offset.reshape(-1)
    codes = np.empty((num_rows, width), dtype=np.int8)
    # Products may overflow, and so may 1/scale; what they give is then an exception.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        reciprocal = np.float32(1) / scale
        half = scale * np.float32(0.5)
        sink_limit = norm.reshape(-1) * np.float32(SINK_NORM)
        found = [
            _quantise_block(
                np.ascontiguousarray(bits[start : start + rows]).reshape(-1, width),
                codes[start : start + rows],
                (scale, offset, reciprocal, half, sink_limit),
                largest,
                start * width,
            )
            for rows in (_block_rows(width),)
            for start in range(0, num_rows, rows)
        ]
    exception_at = np.concatenate([np.empty(0, dtype=np.int64), *found])
    return Quantised(codes, scale, offset, exception_at, bits.reshape(-1)[exception_at])


def lossless(bits: npt.NDArray[np.uint16]) -> Quantised:
    """Rows of bf16 bits, uint16 [N, C], as they are."""
    return Quantised(bits, None, None, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint16))


def dequantise(quantised: Quantised, *, out: npt.NDArray[np.uint16] | None = None) -> npt.NDArray[np.uint16]:
    """bf16 bits uint16 [N, C], written to `out` (C-contiguous) if given. ~1 GB/s a core for int8 codes."""
    if quantised.scale is None or quantised.offset is None:
        assert quantised.codes.dtype == np.uint16
        if out is None:
            return quantised.codes.astype(np.uint16)
        out[...] = quantised.codes
        return out
    if out is None:
        out = np.empty(quantised.codes.shape, dtype=np.uint16)
    assert out.flags.c_contiguous
    dequantise_codes(quantised.codes, quantised.scale, quantised.offset, out)
    out.reshape(-1)[quantised.exception_at] = quantised.exception_bits
    return out


def dequantise_codes(
    codes: npt.NDArray[Any],
    scale: npt.NDArray[np.float32],
    offset: npt.NDArray[np.float32],
    out: npt.NDArray[np.uint16],
) -> None:
    """The codes' part of `dequantise`, without exceptions, for callers that split rows or channels over threads.

    codes int8 (or int16) [N, C], scale and offset float32 [C], out uint16 [N, C]. The GIL is released in every pass.
    """
    num_rows, width = codes.shape
    rows = min(_block_rows(width), max(num_rows, 1))
    values = np.empty((rows, width), dtype=np.float32)
    odd = np.empty((rows, width), dtype=np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, num_rows, rows):
            block = codes[start : start + rows]
            value = values[: len(block)]
            np.multiply(block, scale, out=value)
            value += offset
            _round_to_bf16(value, odd[: len(block)], out[start : start + rows])


def _shapes(spec: StoreSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the statistics, by name, in the order of the fields."""
    layers, last = (NUM_AUX_LAYERS, spec.hidden_size), (spec.hidden_size,)
    return {
        "aux_mean": layers,
        "aux_std": layers,
        "aux_norm": (NUM_AUX_LAYERS,),
        "aux_scale": layers,
        "aux_offset": layers,
        "last_mean": last,
        "last_std": last,
        "last_norm": (),
        "last_scale": last,
        "last_offset": last,
        "calibration_tokens": (),
    }


def _quantise_block(
    bits: npt.NDArray[np.uint16],
    codes: npt.NDArray[np.int8],
    constants: tuple[npt.NDArray[np.float32], ...],
    largest: int,
    first: int,
) -> npt.NDArray[np.int64]:
    """Fill `codes` [N, C] and return the flat positions of exceptions, from `first` on."""
    scale, offset, reciprocal, half, sink_limit = constants
    x = _float32(bits)
    code = x - offset
    code *= reciprocal
    np.rint(code, out=code)
    np.clip(code, -largest, largest, out=code)
    # The very computation of the decoder, so that the bound holds for what it gives.
    value = code * scale
    value += offset
    decoded = np.empty(bits.shape, dtype=np.uint16)
    _round_to_bf16(value, np.empty(bits.shape, dtype=np.uint32), decoded)
    value = _float32(decoded)
    error = value - x
    np.abs(error, out=error)
    # Not `error > half`: NaN must be an exception.
    bad = ~(error <= half)
    # float32 differences are rounded, monotonously: one that is over half a scale may look like just that.
    edge = np.flatnonzero(error == half)
    bad.reshape(-1)[edge] |= _is_over(value.reshape(-1)[edge], x.reshape(-1)[edge], error.reshape(-1)[edge])
    norms = np.sqrt(np.einsum("nlc,nlc->nl", *(2 * [x.reshape(len(x), len(sink_limit), -1)])))
    sinks = ~(norms <= sink_limit) & (sink_limit > 0)
    if sinks.any():
        bad.reshape(*sinks.shape, -1)[sinks] = True
    at = np.flatnonzero(bad)
    code.reshape(-1)[at] = 0
    codes[...] = code
    return at + first


def _is_over(
    value: npt.NDArray[np.float32], x: npt.NDArray[np.float32], half: npt.NDArray[np.float32]
) -> npt.NDArray[np.bool_]:
    """Whether |value - x| > half, exactly: Knuth's two-sum gives what float64 rounds off as well."""
    left, right = value.astype(np.float64), -x.astype(np.float64)
    total = left + right
    added = total - left
    rest = (left - (total - added)) + (right - added)
    size = np.abs(total)
    limit = half.astype(np.float64)
    over: npt.NDArray[np.bool_] = (size > limit) | ((size == limit) & (np.sign(total) * rest > 0))
    return over


def _round_to_bf16(value: npt.NDArray[np.float32], odd: npt.NDArray[np.uint32], out: npt.NDArray[np.uint16]) -> None:
    """bf16 bits of float32 `value` (destroyed), to nearest, ties to even. Not for NaN: no scale and offset give one."""
    word = value.view(np.uint32)
    np.right_shift(word, 16, out=odd)
    odd &= 1
    odd += 0x7FFF
    word += odd
    out[...] = word.view(np.uint16)[:, 1::2]


def _float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    word = bits.astype(np.uint32)
    word <<= 16
    return word.view(np.float32)


def _block_rows(width: int) -> int:
    return max(1, _BLOCK_BYTES // (4 * width))


def _moments(
    parts: list[npt.NDArray[np.uint16]], spec: StoreSpec
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Mean and std float32 [D] and median norm float32 [] of the rows of `parts`, each uint16 [N, D]."""
    hidden = spec.hidden_size
    with np.errstate(over="ignore", invalid="ignore"):
        norms = [np.sqrt(np.square(_float32(part)).sum(axis=1, dtype=np.float64)) for part in parts]
    every = np.concatenate([np.empty(0), *norms])
    every = every[np.isfinite(every)]
    if every.size == 0:
        return np.zeros(hidden, dtype=np.float32), np.ones(hidden, dtype=np.float32), np.zeros((), dtype=np.float32)
    median = float(np.median(every))
    kept = [_float32(part[norm <= SINK_NORM * median]) for part, norm in zip(parts, norms, strict=True)]
    count = sum(len(part) for part in kept)
    mean = np.sum([part.sum(axis=0, dtype=np.float64) for part in kept], axis=0) / count
    # Two passes: the sums of squares of a channel with |mean| >> std would cancel.
    squares = [np.square(part - mean).sum(axis=0, dtype=np.float64) for part in kept]
    std = np.sqrt(np.sum(squares, axis=0) / count)
    floor = max(_SMALLEST_RELATIVE_STD * float(np.median(std)), _SMALLEST_STD)
    return mean.astype(np.float32), np.maximum(std, floor).astype(np.float32), np.array(median, dtype=np.float32)
