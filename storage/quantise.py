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

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from storage.bf16 import round_to_bf16
from storage.calibration import SINK_NORM, Statistics, calibrate
from storage.forms import LARGEST_CODE

__all__ = [
    "SINK_NORM",
    "Quantised",
    "Statistics",
    "calibrate",
    "dequantise",
    "dequantise_codes",
    "lossless",
    "quantise",
]

# Bytes of float32 scratch a block: it stays in a core's second-level cache, where each pass runs at ~10 GB/s.
_BLOCK_BYTES = 1 << 18
# A part that takes a millisecond is worth a thread.
_VALUES_A_THREAD = 1 << 20

_Result = TypeVar("_Result")


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
    flat = bits.reshape(num_rows, width)

    def code(start: int, stop: int) -> npt.NDArray[np.int64]:
        at = _quantise_rows(flat[start:stop], codes[start:stop], scale, offset, norm.reshape(-1), largest)
        shifted: npt.NDArray[np.int64] = at + start * width
        return shifted

    exception_at = np.concatenate([np.empty(0, dtype=np.int64), *_in_parts(code, num_rows, width)])
    return Quantised(codes, scale, offset, exception_at, flat.reshape(-1)[exception_at])


def lossless(bits: npt.NDArray[np.uint16]) -> Quantised:
    """Rows of bf16 bits, uint16 [N, C], as they are."""
    return Quantised(bits, None, None, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint16))


def dequantise(quantised: Quantised, *, out: npt.NDArray[np.uint16] | None = None) -> npt.NDArray[np.uint16]:
    """bf16 bits uint16 [N, C], written to `out` (C-contiguous) if given; when lossless and without `out`, the codes.

    ~1 GB/s a core for int8 codes.
    """
    if quantised.scale is None or quantised.offset is None:
        assert quantised.codes.dtype == np.uint16
        if out is None:
            return quantised.codes.view(np.uint16)
        out[...] = quantised.codes
        return out
    if out is None:
        out = np.empty(quantised.codes.shape, dtype=np.uint16)
    assert out.flags.c_contiguous
    codes, scale, offset, into = quantised.codes, quantised.scale, quantised.offset, out
    _in_parts(lambda start, stop: dequantise_codes(codes[start:stop], scale, offset, into[start:stop]), *codes.shape)
    out.reshape(-1)[quantised.exception_at] = quantised.exception_bits
    return out


def dequantise_codes(
    codes: npt.NDArray[Any],
    scale: npt.NDArray[np.float32],
    offset: npt.NDArray[np.float32],
    out: npt.NDArray[np.uint16],
) -> None:
    """The codes' part of `dequantise`, without exceptions and on one core, for callers that have threads of their own.

    codes int8 [N, C], scale and offset float32 [C], out uint16 [N, C].
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
            out[start : start + rows] = round_to_bf16(value, odd[: len(block)]).view(np.uint16)[:, 1::2]


def _quantise_rows(
    bits: npt.NDArray[np.uint16],
    codes: npt.NDArray[np.int8],
    scale: npt.NDArray[np.float32],
    offset: npt.NDArray[np.float32],
    norm: npt.NDArray[np.float32],
    largest: int,
) -> npt.NDArray[np.int64]:
    """Fill `codes` [N, C] and return the flat positions of exceptions. norm float32 [G]."""
    num_rows, width = bits.shape
    rows = min(_block_rows(width), max(num_rows, 1))
    # Allocated once: the system clears the pages of a new array this large, which costs as much as a pass over it.
    x_word, word, odd = (np.empty((rows, width), dtype=np.uint32) for _ in range(3))
    code_values = np.empty((rows, width), dtype=np.float32)
    found = []
    # Products may overflow, and so may 1/scale; what they give is then an exception.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        reciprocal = np.float32(1) / scale
        half = scale * np.float32(0.5)
        sink_limit = norm * np.float32(SINK_NORM)
        for start in range(0, num_rows, rows):
            block = bits[start : start + rows]
            count = len(block)
            x = np.left_shift(block, 16, out=x_word[:count], dtype=np.uint32).view(np.float32)
            code = np.subtract(x, offset, out=code_values[:count])
            code *= reciprocal
            np.rint(code, out=code)
            np.clip(code, -largest, largest, out=code)
            # The very computation of the decoder, so that the bound holds for what it gives.
            value = np.multiply(code, scale, out=word[:count].view(np.float32))
            value += offset
            rounded = round_to_bf16(value, odd[:count])
            rounded &= np.uint32(0xFFFF_0000)
            error = np.subtract(value, x, out=odd[:count].view(np.float32))
            np.abs(error, out=error)
            # Not `error > half`: NaN must be an exception. Half a scale itself is looked at once more.
            bad = np.less(error, half)
            np.logical_not(bad, out=bad)
            at = np.flatnonzero(bad)
            at = at[_is_over(value.reshape(-1)[at], x.reshape(-1)[at], half[at % width])]
            layers = x.reshape(count, len(sink_limit), -1)
            norms = np.sqrt(np.einsum("nlc,nlc->nl", layers, layers))
            sinks = ~(norms <= sink_limit) & (sink_limit > 0)
            if sinks.any():
                bad[...] = False
                bad.reshape(-1)[at] = True
                bad.reshape(*sinks.shape, -1)[sinks] = True
                at = np.flatnonzero(bad)
            code.reshape(-1)[at] = 0
            codes[start : start + rows] = code
            found.append(at + start * width)
    return np.concatenate([np.empty(0, dtype=np.int64), *found])


def _is_over(
    value: npt.NDArray[np.float32], x: npt.NDArray[np.float32], half: npt.NDArray[np.float32]
) -> npt.NDArray[np.bool_]:
    """Whether |value - x| > half, or either is no number, exactly: Knuth's two-sum keeps what float64 rounds off."""
    left, right = value.astype(np.float64), -x.astype(np.float64)
    total = left + right
    added = total - left
    rest = (left - (total - added)) + (right - added)
    size = np.abs(total)
    limit = half.astype(np.float64)
    over: npt.NDArray[np.bool_] = ~((size < limit) | ((size == limit) & (np.sign(total) * rest <= 0)))
    return over


def _in_parts(work: Callable[[int, int], _Result], num_rows: int, width: int) -> list[_Result]:
    """`work(start, stop)` on parts of the rows, on as many cores as are worth a thread; the results in order.

    numpy lets other threads run while it computes.
    """
    threads = max(1, min(_cores(), num_rows * width // _VALUES_A_THREAD))
    bounds = np.linspace(0, num_rows, threads + 1).astype(int).tolist()
    if threads == 1:
        return [work(0, num_rows)]
    with ThreadPoolExecutor(threads, thread_name_prefix="store-quantise") as executor:
        return list(executor.map(work, bounds[:-1], bounds[1:]))


def _cores() -> int:
    """Cores of this process, at most 8: more only wait for memory."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _block_rows(width: int) -> int:
    return max(1, _BLOCK_BYTES // (4 * width))
