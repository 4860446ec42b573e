"""What codes are relative to: means, deviations, scales of each channel, from the first samples of a segment.

Frozen once: a code means the same in every sample of the segment, so that no scale travels with a token. What later
samples lose by it, should they differ, is room (storage.drift), never precision: what does not fit is kept exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.bf16 import float32_of
from storage.errors import StoreError
from storage.schema import NUM_AUX_LAYERS, Sample, StoreSpec

SINK_NORM = 5.0
# See `code_constants`. Bits of an exception: 20 of its own (2.5 bytes, measured), less those of the code it replaces.
_SCALE_BITS = range(1, 8)
_EXCEPTION_BITS = 17.0
_BLOCK_ROWS = 512
_OTHER_DTYPES = {"calibration_tokens": "int64", "aux_sink": "uint16", "last_sink": "uint16"}
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
    aux_sink: npt.NDArray[np.uint16]
    """bf16 bits uint16 [3, D]: the first sink of each layer; zeros without one. See storage.encoding."""
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
    last_sink: npt.NDArray[np.uint16]
    """bf16 bits uint16 [D] likewise."""
    calibration_tokens: int
    """Tokens that the auxiliary statistics come from."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Every field as an array (calibration_tokens int64 []), as a segment stores them."""
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
            dtype = np.dtype(_OTHER_DTYPES.get(name, "float32"))
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


def calibrate(samples: Iterable[Sample], spec: StoreSpec) -> Statistics:
    """Statistics of the samples given: all of them are held, so give as many tokens as are worth it (16K are plenty).

    Sums in float64; sinks and tokens with NaN or Inf left out. Without a row to learn from: mean 0, std 1, norm 0.
    """
    held = list(samples)
    layers = [_moments([sample.aux_hidden[:, layer] for sample in held], spec) for layer in range(NUM_AUX_LAYERS)]
    aux_mean, aux_std, aux_norm, aux_sink = (np.stack(parts) for parts in zip(*layers, strict=True))
    last = [sample.last_hidden for sample in held if sample.last_hidden is not None]
    last_mean, last_std, last_norm, last_sink = _moments(last, spec)
    aux_scale, aux_offset = code_constants(aux_mean, aux_std, spec.encoding.aux_step)
    last_scale, last_offset = code_constants(last_mean, last_std, spec.encoding.last_step)
    return Statistics(
        aux_mean=aux_mean,
        aux_std=aux_std,
        aux_norm=aux_norm,
        aux_scale=aux_scale,
        aux_offset=aux_offset,
        aux_sink=aux_sink,
        last_mean=last_mean,
        last_std=last_std,
        last_norm=last_norm,
        last_scale=last_scale,
        last_offset=last_offset,
        last_sink=last_sink,
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


def _shapes(spec: StoreSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the statistics, by name, in the order of the fields."""
    layers, last = (NUM_AUX_LAYERS, spec.hidden_size), (spec.hidden_size,)
    return {
        "aux_mean": layers,
        "aux_std": layers,
        "aux_norm": (NUM_AUX_LAYERS,),
        "aux_scale": layers,
        "aux_offset": layers,
        "aux_sink": layers,
        "last_mean": last,
        "last_std": last,
        "last_norm": (),
        "last_scale": last,
        "last_offset": last,
        "last_sink": last,
        "calibration_tokens": (),
    }


def _moments(
    parts: list[npt.NDArray[np.uint16]], spec: StoreSpec
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.uint16]]:
    """Mean and std float32 [D], median norm float32 [], first sink uint16 [D] of the rows of `parts`, uint16 [N, D]."""
    hidden = spec.hidden_size
    sink = np.zeros(hidden, dtype=np.uint16)
    # In blocks of rows: a part of 16K tokens of D = 4,096 whole would take 1.3 GB in float64.
    parts = [part[start : start + _BLOCK_ROWS] for part in parts for start in range(0, len(part), _BLOCK_ROWS)]
    with np.errstate(over="ignore", invalid="ignore"):
        norms = [np.sqrt(np.square(float32_of(part)).sum(axis=1, dtype=np.float64)) for part in parts]
    every = np.concatenate([np.empty(0), *norms])
    every = every[np.isfinite(every)]
    if every.size == 0:
        return np.zeros(hidden, dtype=np.float32), np.ones(hidden, dtype=np.float32), np.zeros((), np.float32), sink
    median = float(np.median(every))
    is_sink = [norm > SINK_NORM * median for norm in norms]
    for part, chosen in zip(parts, is_sink, strict=True):
        if chosen.any():
            sink = part[chosen][0].copy()
            break
    kept = [float32_of(part[norm <= SINK_NORM * median]) for part, norm in zip(parts, norms, strict=True)]
    count = sum(len(part) for part in kept)
    mean = np.sum([part.sum(axis=0, dtype=np.float64) for part in kept], axis=0) / count
    # Two passes: the sums of squares of a channel with |mean| >> std would cancel.
    squares = [np.square(part - mean).sum(axis=0, dtype=np.float64) for part in kept]
    std = np.sqrt(np.sum(squares, axis=0) / count)
    floor = max(_SMALLEST_RELATIVE_STD * float(np.median(std)), _SMALLEST_STD)
    return mean.astype(np.float32), np.maximum(std, floor).astype(np.float32), np.array(median, np.float32), sink
