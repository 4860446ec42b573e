"""From a sample to the named arrays that a store keeps, and back.

The input/output layer (writer, shard, reader) knows only names, axes and numbers of rows; what the rows mean is known
here and in docs/store.md. Decoding has two ends: `decode_sample` gives bfloat16 on the host, `encoded_states` the codes
themselves, which go to the GPU at a quarter to half of the bytes and are dequantised there (kernels.dequantize).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import StoreError
from storage.forms import What, form_of, from_form, largest_code, step_of, to_form
from storage.presets import DEFAULT_PRESET, LAST_FORMS, PRESETS, Encoding, LastForm, encoding_of, preset_name
from storage.quantise import Quantised, Statistics, dequantise, lossless, quantise
from storage.schema import (
    LOSS_MASK,
    NUM_AUX_LAYERS,
    TAIL_LEVEL,
    TARGET_ARGMAX,
    TARGET_LSE_BITS,
    TOKEN_ID,
    Sample,
    StoreSpec,
    TopK,
    array_schemas,
    target_rows,
    target_window,
)
from storage.topk import decode_top_k, encode_top_k

__all__ = [
    "DEFAULT_PRESET",
    "LAST_FORMS",
    "PRESETS",
    "EncodedSample",
    "Encoding",
    "LastForm",
    "decode_sample",
    "encode_sample",
    "encoded_states",
    "encoding_of",
    "escaped_values",
    "preset_name",
    "round_trip",
]

# Distances between exceptions are uint32; the largest is the array's fill value.
_LARGEST_GAP = 2**32 - 2
# Set in the word of an exception whose bits are relative to the statistics' sink. A sink is (nearly) always the first
# token, which is the same in every sample, and so are its states, bit for bit: nothing is left of them.
_SINK = np.uint32(1 << 16)
NamedArrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedSample:
    """A sample, or a window of one, its states in stored form. W = stop - start tokens; R target rows among them."""

    sample_id: str
    """The sample's id."""
    token_ids: npt.NDArray[np.int32]
    """int32 [W]."""
    loss_mask: npt.NDArray[np.bool_]
    """bool [W]; R = len(target_rows(loss_mask))."""
    target_argmax: npt.NDArray[np.int32]
    """int32 [R]."""
    target_lse: npt.NDArray[np.float32]
    """float32 [R]."""
    aux: Quantised
    """W rows of 3 D channels."""
    last: Quantised | TopK
    """R rows of D channels, or R rows of k entries."""
    start: int
    """The window's first token in the sample."""
    stop: int
    """One past its last token."""

    @property
    def nbytes(self) -> int:
        """Bytes of its states as they are: what goes to the GPU, exceptions at 10 bytes each."""
        total = self.aux.codes.nbytes + 10 * len(self.aux.exception_at)
        if isinstance(self.last, TopK):
            return total + self.last.ids.nbytes + self.last.log_probabilities.nbytes
        return total + self.last.codes.nbytes + 10 * len(self.last.exception_at)


def encode_sample(sample: Sample, spec: StoreSpec, statistics: Statistics | None) -> dict[str, npt.NDArray[Any]]:
    """The arrays of one valid sample by name, each [rows, *row_shape] in the dtype of `array_schemas`, C-contiguous.

    statistics: None only where the encoding needs none.
    """
    encoding = spec.encoding
    schemas = {array.name: array for array in array_schemas(spec)}
    rows = target_rows(sample.loss_mask)
    columns = schemas["tokens"].row_shape[0]
    tokens = np.zeros((sample.token_ids.size, columns), dtype=np.int32)
    tokens[:, TOKEN_ID] = sample.token_ids
    tokens[:, LOSS_MASK] = sample.loss_mask
    tokens[rows, TARGET_ARGMAX] = sample.target_argmax
    tokens[rows, TARGET_LSE_BITS] = sample.target_lse.view(np.int32)
    arrays: dict[str, npt.NDArray[Any]] = {"tokens": tokens}

    aux = _quantised_aux(sample, encoding, statistics)
    _put_states(arrays, "aux", aux, spec)
    last: Quantised | None = None
    if encoding.last == "hidden":
        last = _quantised_last(sample, encoding, statistics)
        _put_states(arrays, "last", last, spec)
    else:
        assert sample.top_k is not None
        arrays["topk"], tokens[rows, TAIL_LEVEL] = encode_top_k(sample.top_k, vocab_size=spec.vocab_size)
    if encoding.needs_statistics:
        arrays["exceptions"] = _exceptions(sample, aux, last, statistics)
    return {name: np.ascontiguousarray(arrays[name]) for name in schemas}


def decode_sample(
    arrays: NamedArrays,
    *,
    sample_id: str,
    spec: StoreSpec,
    statistics: Statistics | None,
    overwrite: bool = False,
) -> Sample:
    """The sample whose arrays these are, all its rows. overwrite and StoreError as for `encoded_states`."""
    encoded = encoded_states(arrays, sample_id=sample_id, spec=spec, statistics=statistics, overwrite=overwrite)

    def bits(states: Quantised) -> npt.NDArray[np.uint16]:
        if overwrite and states.scale is None:
            return states.codes.view(np.uint16)  # which they are
        return dequantise(states)

    top_k = encoded.last if isinstance(encoded.last, TopK) else None
    return Sample(
        sample_id=sample_id,
        token_ids=encoded.token_ids,
        loss_mask=encoded.loss_mask,
        aux_hidden=bits(encoded.aux).reshape(-1, NUM_AUX_LAYERS, spec.hidden_size),
        target_argmax=encoded.target_argmax,
        target_lse=encoded.target_lse,
        last_hidden=None if isinstance(encoded.last, TopK) else bits(encoded.last),
        top_k=top_k,
    )


def encoded_states(
    arrays: NamedArrays,
    *,
    sample_id: str,
    spec: StoreSpec,
    statistics: Statistics | None,
    start: int = 0,
    stop: int | None = None,
    overwrite: bool = False,
) -> EncodedSample:
    """The tokens `start` to `stop` of a sample, states in stored form: views of the arrays given where possible.

    arrays: `tokens` and `exceptions` whole; states on the tokens axis rows start .. stop; states on the targets axis
    rows `target_window(loss_mask, start, stop)`, the mask being column LOSS_MASK of `tokens`. overwrite: the arrays are
    the caller's no more, so that lossless states can take their place.
    StoreError, naming sample and array, for numbers of rows that do not fit together or exceptions that lie nowhere.
    """
    encoding, hidden = spec.encoding, spec.hidden_size
    tokens = arrays["tokens"]
    num_tokens = len(tokens)
    stop = num_tokens if stop is None else stop
    if not 0 <= start < stop <= num_tokens:
        raise StoreError(f"sample {sample_id}: window {start} to {stop} is not within its {num_tokens} tokens")
    mask = tokens[:, LOSS_MASK] != 0
    first, last = target_window(mask, start, stop)
    whole = start == 0 and stop == num_tokens
    own_rows = target_rows(mask[start:stop]) + start
    for array in array_schemas(spec):
        due = {"tokens": stop - start, "targets": last - first}.get(array.axis)
        if array.name != "tokens" and due is not None and len(arrays[array.name]) != due:
            raise StoreError(f"sample {sample_id}: {array.name} has {len(arrays[array.name])} rows where {due} are due")
    positions, bits = _positions(arrays, sample_id, spec, statistics)
    aux_values = num_tokens * NUM_AUX_LAYERS * hidden
    num_targets = last - first if whole else len(target_rows(mask))
    end = aux_values + (num_targets * hidden if encoding.last == "hidden" else 0)
    if positions.size and positions[-1] >= end:
        raise StoreError(
            f"sample {sample_id}: exceptions is damaged: it names element {positions[-1]} of {end}; "
            "see `eyas store verify`"
        )
    split = int(np.searchsorted(positions, aux_values))
    width = NUM_AUX_LAYERS * hidden
    aux = _stored(
        arrays,
        "aux",
        spec,
        statistics,
        positions[:split],
        bits[:split],
        window=(start, stop),
        width=width,
        overwrite=overwrite,
    )
    if encoding.last == "hidden":
        at, kept = positions[split:] - aux_values, bits[split:]
        target = _stored(
            arrays, "last", spec, statistics, at, kept, window=(first, last), width=hidden, overwrite=overwrite
        )
    else:
        tail = tokens[own_rows, TAIL_LEVEL].astype(np.int32)
    return EncodedSample(
        sample_id=sample_id,
        token_ids=np.ascontiguousarray(tokens[start:stop, TOKEN_ID]),
        loss_mask=mask[start:stop],
        target_argmax=tokens[own_rows, TARGET_ARGMAX],
        target_lse=tokens[own_rows, TARGET_LSE_BITS].view(np.float32),
        aux=aux,
        last=target if encoding.last == "hidden" else decode_top_k(arrays["topk"], tail),
        start=start,
        stop=stop,
    )


def round_trip(sample: Sample, spec: StoreSpec, statistics: Statistics | None) -> Sample:
    """What a reader gives for `sample` once it is stored: for a run that trains online and fills the store."""
    arrays = encode_sample(sample, spec, statistics)
    return decode_sample(arrays, sample_id=sample.sample_id, spec=spec, statistics=statistics)


def escaped_values(arrays: NamedArrays) -> int:
    """Exceptions of an encoded sample: a writer watches their share, as statistics that no longer fit raise it."""
    return len(arrays["exceptions"]) if "exceptions" in arrays else 0


def _quantised_aux(sample: Sample, encoding: Encoding, statistics: Statistics | None) -> Quantised:
    if encoding.aux_step is None:
        return lossless(sample.aux_hidden.reshape(len(sample.aux_hidden), -1))
    assert statistics is not None, "a lossy encoding needs statistics"
    return quantise(
        sample.aux_hidden,
        scale=statistics.aux_scale,
        offset=statistics.aux_offset,
        norm=statistics.aux_norm,
        largest=largest_code(form_of(encoding, "aux")),
    )


def _quantised_last(sample: Sample, encoding: Encoding, statistics: Statistics | None) -> Quantised:
    assert sample.last_hidden is not None
    if encoding.last_step is None:
        return lossless(sample.last_hidden)
    assert statistics is not None, "a lossy encoding needs statistics"
    return quantise(
        sample.last_hidden[:, None],
        scale=statistics.last_scale[None],
        offset=statistics.last_offset[None],
        norm=statistics.last_norm[None],
        largest=largest_code(form_of(encoding, "last")),
    )


def _put_states(arrays: dict[str, npt.NDArray[Any]], what: What, states: Quantised, spec: StoreSpec) -> None:
    form = form_of(spec.encoding, what)
    layers = (NUM_AUX_LAYERS,) if what == "aux" else ()
    arrays[f"{what}_{form}"] = to_form(states.codes.reshape(-1, *layers, spec.hidden_size), form)


def _exceptions(
    sample: Sample, aux: Quantised, last: Quantised | None, statistics: Statistics | None
) -> npt.NDArray[np.uint32]:
    """Rows of `exceptions`: distance and bits, uint32 [E, 2]."""
    assert statistics is not None
    positions, bits = aux.exception_at, aux.exception_bits
    if last is not None:
        positions = np.concatenate([positions, last.exception_at + aux.codes.size])
        bits = np.concatenate([bits, last.exception_bits])
    missing = bridges(positions)
    if missing.size:
        aux_bits = sample.aux_hidden.reshape(-1)
        more = [
            aux_bits[at] if at < aux_bits.size or sample.last_hidden is None
            else sample.last_hidden.reshape(-1)[at - aux_bits.size]
            for at in missing
        ]  # fmt: skip
        order = np.argsort(np.concatenate([positions, missing]), kind="stable")
        positions = np.concatenate([positions, missing])[order]
        bits = np.concatenate([bits, np.array(more, dtype=np.uint16)])[order]
    words = bits.astype(np.uint32)
    hidden = sample.aux_hidden.shape[2]
    _, counts = np.unique(positions // hidden, return_counts=True)
    is_sink = np.repeat(counts == hidden, counts)
    sinks = _sink_bits(positions[is_sink], statistics, hidden, num_aux=aux.codes.size)
    words[is_sink] = (words[is_sink] ^ sinks) | _SINK
    rows = np.empty((len(positions), 2), dtype=np.uint32)
    rows[:, 0] = np.diff(positions, prepend=0)
    rows[:, 1] = words
    return rows


def _sink_bits(
    positions: npt.NDArray[np.int64], statistics: Statistics, hidden: int, *, num_aux: int
) -> npt.NDArray[np.uint32]:
    """What the statistics' sinks have at these elements, uint32 bits."""
    layers = np.concatenate([statistics.aux_sink, statistics.last_sink[None]])
    layer = np.where(positions < num_aux, positions // hidden % NUM_AUX_LAYERS, NUM_AUX_LAYERS)
    found: npt.NDArray[np.uint32] = layers[layer, positions % hidden].astype(np.uint32)
    return found


def bridges(positions: npt.NDArray[np.int64], *, largest: int = _LARGEST_GAP) -> npt.NDArray[np.int64]:
    """Positions to add so that no distance (the first counts from 0) is above `largest`; int64, ascending."""
    gaps = np.diff(positions, prepend=0)
    starts = positions - gaps
    wide = np.flatnonzero(gaps > largest)
    added = [np.arange(starts[i] + largest, positions[i], largest, dtype=np.int64) for i in wide]
    return np.concatenate([np.empty(0, dtype=np.int64), *added])


def _positions(
    arrays: NamedArrays, sample_id: str, spec: StoreSpec, statistics: Statistics | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint16]]:
    """Element numbers and bits of a sample's exceptions."""
    if not spec.encoding.needs_statistics:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint16)
    assert statistics is not None, "a lossy encoding needs statistics"
    rows = arrays["exceptions"]
    if (rows[:, 1] >= 2 * _SINK).any() or (rows[1:, 0] == 0).any():
        raise StoreError(f"sample {sample_id}: exceptions is damaged: it holds what no writer writes")
    positions = np.cumsum(rows[:, 0], dtype=np.int64)
    bits = (rows[:, 1] & 0xFFFF).astype(np.uint16)
    is_sink = rows[:, 1] >= _SINK
    num_aux = len(arrays["tokens"]) * NUM_AUX_LAYERS * spec.hidden_size
    bits[is_sink] ^= _sink_bits(positions[is_sink], statistics, spec.hidden_size, num_aux=num_aux).astype(np.uint16)
    return positions, bits


def _stored(
    arrays: NamedArrays,
    what: What,
    spec: StoreSpec,
    statistics: Statistics | None,
    at: npt.NDArray[np.int64],
    bits: npt.NDArray[np.uint16],
    *,
    window: tuple[int, int],
    width: int,
    overwrite: bool,
) -> Quantised:
    """The states `what` of a window of rows; at, bits: the exceptions of the whole sample in them."""
    first, last = window
    form = form_of(spec.encoding, what)
    states = from_form(arrays[f"{what}_{form}"], form, spec.hidden_size, overwrite=overwrite).reshape(
        last - first, width
    )
    if step_of(spec.encoding, what) is None:
        return lossless(states)
    assert statistics is not None, "a lossy encoding needs statistics"
    scale, offset = (
        (statistics.aux_scale, statistics.aux_offset)
        if what == "aux"
        else (statistics.last_scale, statistics.last_offset)
    )
    low, high = np.searchsorted(at, [first * width, last * width])
    return Quantised(
        codes=states,
        scale=scale.reshape(width),
        offset=offset.reshape(width),
        exception_at=at[low:high] - first * width,
        exception_bits=bits[low:high],
    )
