"""What a store holds: its spec, one sample of it, its arrays and their meaning, its statistics.

bf16 travels as uint16 bits, because Zarr v3 and numpy know no bfloat16. Rows are kept only where somebody reads them:
a token's auxiliary states always, its soft target only on a *target row* (see `target_rows`), which at 25% supervised
tokens saves a fifth of the bytes. So a store has three axes, and an array lies on one of them:

    tokens       T rows a sample: auxiliary states, token ids, loss mask
    targets      R rows a sample: the soft target's states
    exceptions   E rows a sample: values that a lossy encoding keeps exactly

Every sample starts on a shard boundary of every axis. Each array's fill value is one that no sample may hold, where its
type has one (a NaN pattern, -128, -1): what was never written cannot be taken for data by whoever opens the arrays with
plain zarr.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from storage.codecs import ChunkCodec
from storage.errors import StoreError
from storage.forms import PLANES_FILL, What, dtype_of, form_of, row_shape
from storage.presets import DEFAULT_PRESET, PRESETS, Encoding, encoding_of

FORMAT_NAME = "eyas.hidden_states"
FORMAT_VERSION = 2

NUM_AUX_LAYERS = 3
Axis = Literal["tokens", "targets", "exceptions"]
AXES: tuple[Axis, ...] = ("tokens", "targets", "exceptions")

# Rows of the two narrow arrays. A sample of 16K tokens is to be one object of each, and a short one is not to pay for
# many places in their shards' indexes. What pads a chunk compresses to nothing.
TOKENS_ROWS = 16_384
_FEWEST_EXCEPTIONS = 1024
_EXCEPTION_CHUNKS = 4
# On real states 1 in 250 to 1 in 1,000 values is an exception.
_VALUES_AN_EXCEPTION = 256
_TOP_K_COLUMNS = 64
_FEWEST_TOP_K_COLUMNS = 16
# Columns of `tokens`; the last is there with top-k targets only.
TOKEN_ID, LOSS_MASK, TARGET_ARGMAX, TARGET_LSE_BITS, TAIL_LEVEL = range(5)

# Fingerprints and sample ids become file names and keys of object stores.
SAFE_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,127}")
_LARGEST_VOCABULARY = 2**31


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """What the states of one fingerprint are. Written into the store's attributes, compared whenever it is opened."""

    fingerprint: str
    """Hash of target weights, tokenizer, chat template, layer ids and dtype; the store's folder under its URL."""
    target: str
    """Name of the target, for people; the fingerprint is what counts."""
    aux_layer_ids: tuple[int, ...]
    """Three 0-based decoder layers, low to high, whose outputs are `aux_hidden`."""
    hidden_size: int
    """D, the target's hidden size."""
    vocab_size: int
    """V, the target's full vocabulary: the range of `token_ids`, `target_argmax` and top-k ids; at most 2^31."""
    encoding: Encoding = field(default=PRESETS[DEFAULT_PRESET])
    """How states are held; see storage.presets."""
    chunk_tokens: int = 512
    """Rows in a chunk of states, the unit of compression. Under 256 costs much of the ratio and many more requests."""
    shard_tokens: int = 4096
    """Rows in a shard of states, the unit of writing (one object an array); a multiple of `chunk_tokens`."""

    def __post_init__(self) -> None:
        if not SAFE_NAME.fullmatch(self.fingerprint):
            raise StoreError(
                f"fingerprint {self.fingerprint!r} must be 1-128 letters, digits, '_', '-' or '.': it names a folder"
            )
        ids = self.aux_layer_ids
        if len(ids) != NUM_AUX_LAYERS or min(ids) < 0 or list(ids) != sorted(set(ids)):
            raise StoreError(f"aux_layer_ids {ids} must be {NUM_AUX_LAYERS} rising 0-based layer numbers")
        for name in ("hidden_size", "vocab_size", "chunk_tokens", "shard_tokens"):
            if getattr(self, name) < 1:
                raise StoreError(f"{name} {getattr(self, name)} must be at least 1")
        if self.vocab_size > _LARGEST_VOCABULARY:
            raise StoreError(f"vocab_size {self.vocab_size} must be at most {_LARGEST_VOCABULARY}: ids are int32")
        if self.encoding.top_k is not None and self.encoding.top_k > self.vocab_size:
            raise StoreError(f"top_k {self.encoding.top_k} must be at most vocab_size {self.vocab_size}")
        if self.shard_tokens % self.chunk_tokens:
            raise StoreError(f"shard_tokens {self.shard_tokens} must be a multiple of chunk_tokens {self.chunk_tokens}")


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """The k likeliest tokens of the target on R rows, in any order; a store gives them by ascending id."""

    ids: npt.NDArray[np.int32]
    """int32 [R, k], of the target's vocabulary; no id twice in a row."""
    log_probabilities: npt.NDArray[np.float32]
    """float32 [R, k], natural, over the full vocabulary: 1 - sum(exp) is the tail's mass, and never below 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One conversation's tokens and the target's states on them. T tokens, T >= 1; R target rows; D hidden size."""

    sample_id: str
    """Hash of token ids and loss mask."""
    token_ids: npt.NDArray[np.int32]
    """int32 [T]."""
    loss_mask: npt.NDArray[np.bool_]
    """bool [T], true where a token is supervised; R = len(target_rows(loss_mask))."""
    aux_hidden: npt.NDArray[np.uint16]
    """bf16 bits as uint16 [T, 3, D]; the layers low to high."""
    target_argmax: npt.NDArray[np.int32]
    """int32 [R], over the target's full vocabulary."""
    target_lse: npt.NDArray[np.float32]
    """float32 [R], logsumexp of the target's logits over its full vocabulary."""
    last_hidden: npt.NDArray[np.uint16] | None = None
    """bf16 bits as uint16 [R, D], after the target's final norm; None when `top_k` is given."""
    top_k: TopK | None = None
    """The likeliest tokens instead; None when `last_hidden` is given."""


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What a store holds, and what it costs. Bytes are bytes, not MB."""

    num_samples: int
    """Committed samples."""
    num_tokens: int
    """Tokens of the committed samples."""
    stored_bytes: int
    """Size of the committed samples' shards; metadata, index and what killed writers left come on top."""
    raw_bytes: int
    """The same content uncompressed, see `raw_bytes`: bfloat16 states, last hidden ones on target rows only."""
    num_targets: int = 0
    """Target rows of the committed samples."""


@dataclass(frozen=True, slots=True)
class ArraySchema:
    """One array of the store: [rows of its axis, *row_shape]."""

    name: str
    """Name of the Zarr array and key in the mappings of storage.encoding."""
    dtype: str
    """Numpy name of the element type."""
    axis: Axis
    """What its rows are."""
    row_shape: tuple[int, ...]
    """Shape of one row."""
    chunk_row_shape: tuple[int, ...]
    """The part of a row that one chunk holds: layers are compressed apart, 1.51 against 1.43 x smaller than mixed."""
    chunk_rows: int
    """Rows of a chunk."""
    shard_rows: int
    """Rows of a shard, a multiple of `chunk_rows`. A shard spans whole rows."""
    fill_value: int
    """What plain zarr shows where nothing was written, and what pads a chunk past the end of a sample."""
    meaning: str
    """One line for whoever finds the array."""
    codec: ChunkCodec
    """What compresses a chunk; CRC-32C follows it."""

    @property
    def row_bytes(self) -> int:
        """Uncompressed bytes of one row."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.row_shape, dtype=np.int64))

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of one chunk."""
        return (self.chunk_rows, *self.chunk_row_shape)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of one shard."""
        return (self.shard_rows, *self.row_shape)


def target_rows(loss_mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Rows of `loss_mask` (bool [T]) whose target distribution a TTT step reads: int64 [R], ascending.

    Row p of step k reads the distribution at q = p+1+k, and counts when x[p+1] .. x[p+2+k] are all supervised. Step 0
    of row q-1 already reads each such q, so they are the q >= 1 where q and q+1 are both supervised.
    """
    rows = np.flatnonzero(loss_mask[1:-1] & loss_mask[2:]) + 1
    return rows.astype(np.int64, copy=False)


def target_window(loss_mask: npt.NDArray[np.bool_], start: int, stop: int) -> tuple[int, int]:
    """Which of a sample's target rows are those of its tokens `start` to `stop`: a range [first, last) of 0 .. R.

    They are what `target_rows(loss_mask[start:stop])` finds: q with start < q and q+1 < stop, for a crop neither sees
    the row before it nor the token after it.
    """
    rows = target_rows(loss_mask)
    first, last = np.searchsorted(rows, [start + 1, stop - 1])
    return int(first), int(max(first, last))


def array_schemas(spec: StoreSpec) -> tuple[ArraySchema, ...]:
    """The arrays of a store, in a fixed order. Which they are depends on the encoding."""
    encoding = spec.encoding
    narrow = ChunkCodec("raw", 0) if encoding.codec == "raw" else ChunkCodec("blosc", 1)
    arrays = [_states(spec, "aux", "tokens")]
    arrays.append(_states(spec, "last", "targets") if encoding.last == "hidden" else _top_k(spec))
    arrays.append(
        ArraySchema(
            name="tokens",
            dtype="int32",
            axis="tokens",
            row_shape=(4 if encoding.last == "hidden" else 5,),
            chunk_row_shape=(1,),
            chunk_rows=TOKENS_ROWS,
            shard_rows=TOKENS_ROWS,
            fill_value=-1,
            meaning="columns: token id; 1 where supervised, else 0; and, 0 but on target rows: argmax of the "
            "target's logits over its full vocabulary; float32 bits of their logsumexp; with topk, the level of the "
            "tail's mass; -1: unwritten",
            codec=narrow,
        )
    )
    if encoding.needs_statistics:
        arrays.append(
            ArraySchema(
                name="exceptions",
                dtype="uint32",
                axis="exceptions",
                row_shape=(2,),
                chunk_row_shape=(1,),
                chunk_rows=_exception_rows(spec),
                shard_rows=_EXCEPTION_CHUNKS * _exception_rows(spec),
                fill_value=0xFFFF_FFFF,
                meaning="values kept exactly, ascending: distance from the one before (of the first: from element "
                "0), elements being numbered over aux [T, 3, D], then last [R, D]; its bfloat16 bits, or 65536 + its "
                "bits XOR those of aux_sink or last_sink; 4294967295: unwritten",
                codec=narrow,
            )
        )
    return tuple(arrays)


def _states(spec: StoreSpec, what: What, axis: Axis) -> ArraySchema:
    form = form_of(spec.encoding, what)
    layers = (NUM_AUX_LAYERS,) if what == "aux" else ()
    part = row_shape(form, spec.hidden_size)
    value = "value = bfloat16(code * scale + offset), in float32"
    meaning = {
        "codes": f"int8 codes: {value}; -128: unwritten",
        "pairs": f"two codes a byte, (first + 7) + 15 * (second + 7) of neighbouring channels: {value}; 255: unwritten",
        "planes": "bfloat16 in two bytes, exponent and rest (storage.forms); 193, 193 (NaN): unwritten",
        "bits": "bfloat16 bits; 65535 (NaN): unwritten",
    }[form]
    source = {
        "aux": "outputs of decoder layers aux_layer_ids, low to high",
        "last": "output of the target's final norm, its head's input, on target rows",
    }[what]
    return ArraySchema(
        name=f"{what}_{form}",
        dtype=dtype_of(form),
        axis=axis,
        row_shape=(*layers, *part),
        chunk_row_shape=(*(1 for _ in (*layers, *part[:-1])), part[-1]),
        chunk_rows=spec.chunk_tokens,
        shard_rows=spec.shard_tokens,
        fill_value={"codes": -128, "pairs": 255, "planes": PLANES_FILL, "bits": 0xFFFF}[form],
        meaning=f"{source}: {meaning}",
        codec=ChunkCodec(spec.encoding.codec, spec.encoding.level),
    )


def _top_k(spec: StoreSpec) -> ArraySchema:
    top_k = spec.encoding.top_k
    assert top_k is not None
    # Ids ascend, and tokenizers number frequent tokens first: columns of a kind are compressed together.
    columns = max(width for width in range(1, min(top_k, _TOP_K_COLUMNS) + 1) if top_k % width == 0)
    return ArraySchema(
        name="topk",
        dtype="uint8",
        axis="targets",
        row_shape=(1 + top_k_id_bytes(spec.vocab_size), top_k),
        chunk_row_shape=(1, columns if columns >= _FEWEST_TOP_K_COLUMNS else top_k),
        chunk_rows=spec.chunk_tokens,
        shard_rows=spec.shard_tokens,
        fill_value=255,
        meaning="the target's likeliest tokens by ascending id: level of its log-probability; bytes, low to high, of "
        "the distance from the id before (of the first: from 0)",
        codec=ChunkCodec("raw", 0) if spec.encoding.codec == "raw" else ChunkCodec("zstd", 1),
    )


def _exception_rows(spec: StoreSpec) -> int:
    """Rows of a chunk of exceptions: what a shard of states has at 1 in 256 values, as a power of two."""
    values = spec.shard_tokens * spec.hidden_size * (NUM_AUX_LAYERS + 1)
    return max(_FEWEST_EXCEPTIONS, 1 << max(0, values // _VALUES_AN_EXCEPTION - 1).bit_length())


def top_k_id_bytes(vocab_size: int) -> int:
    """Bytes of the distance between two ids: 2 to 4."""
    return max(2, ((vocab_size - 1).bit_length() + 7) // 8)


def raw_bytes(spec: StoreSpec, *, num_tokens: int, num_targets: int) -> int:
    """Bytes of samples without a store, whatever form the store keeps them in.

    bfloat16 aux states, ids (int32) and mask (a byte) of every token; bfloat16 last hidden state, argmax (int32) and
    logsumexp (float32) of the target rows.
    """
    aux_bytes = 2 * NUM_AUX_LAYERS * spec.hidden_size
    return num_tokens * (aux_bytes + 5) + num_targets * (2 * spec.hidden_size + 8)


def attributes_of(spec: StoreSpec) -> dict[str, Any]:
    """What is written into the attributes of the store's group and of each segment's."""
    return {
        "format": FORMAT_NAME,
        "format_version": FORMAT_VERSION,
        "spec": dataclasses.asdict(spec),
        "meaning": {
            **{array.name: array.meaning for array in array_schemas(spec)},
            "rows": "a sample is a range of rows on each axis (tokens, targets, exceptions) of one segment, as "
            "../index/*.jsonl says; rows that no index entry names are not data",
        },
    }


def spec_of(attributes: object, *, where: str) -> StoreSpec:
    """The spec written in a group's attributes. StoreError names `where` if they are not those of a store of ours."""
    if not isinstance(attributes, Mapping) or attributes.get("format") != FORMAT_NAME:
        raise StoreError(f"{where} is not a store of hidden states: its attributes do not say {FORMAT_NAME!r}")
    version = attributes.get("format_version")
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{where} has format version {version!r}; this release reads {FORMAT_VERSION}: "
            "capture into another store URL"
        )
    try:
        fields = dict(attributes["spec"])
        fields["encoding"] = encoding_of(fields["encoding"])
        return StoreSpec(**{**fields, "aux_layer_ids": tuple(fields["aux_layer_ids"])})
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{where} holds an unreadable spec: {error}") from error


def require_same_spec(stored: StoreSpec, wanted: StoreSpec, *, where: str) -> None:
    """StoreError naming each field in which the stored spec differs from the wanted one, with both values."""
    differences = [
        f"{name} is {found!r} there, {value!r} here"
        for name, found, value in _fields_of(stored, wanted)
        if found != value
    ]
    if differences:
        raise StoreError(
            f"{where} was written with another spec: {'; '.join(differences)}. "
            "Use the stored values, another store URL, or `eyas store convert`"
        )


def _fields_of(stored: StoreSpec, wanted: StoreSpec) -> list[tuple[str, object, object]]:
    """Every field of both, those of the encoding one by one."""
    top = [field.name for field in dataclasses.fields(StoreSpec) if field.name != "encoding"]
    inner = [field.name for field in dataclasses.fields(Encoding)]
    return [
        *((name, getattr(stored, name), getattr(wanted, name)) for name in top),
        *((name, getattr(stored.encoding, name), getattr(wanted.encoding, name)) for name in inner),
    ]
