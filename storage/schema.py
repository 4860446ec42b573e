"""What a store holds: its spec, one sample of it, its arrays and their meaning, its statistics.

bf16 travels as uint16 bits, because Zarr v3 and numpy know no bfloat16. Each array's fill value is one that no
sample may hold (a NaN pattern, -1): what was never written cannot be taken for a hidden state of zeros by whoever
opens the arrays with plain zarr. `loss_mask` has no such value; its checksum in the index speaks for it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from storage.codecs import CODEC_NAMES, CodecName
from storage.errors import StoreError

FORMAT_NAME = "eyas.hidden_states"
FORMAT_VERSION = 1

NUM_AUX_LAYERS = 3
# Fingerprints and sample ids become file names and keys of object stores.
_SAFE_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,127}")
_BF16_EXPONENT = np.uint16(0x7F80)
_BF16_MAGNITUDE = np.uint16(0x7FFF)


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
    """V, the target's full vocabulary: the range of `token_ids` and `target_argmax`."""
    codec: CodecName = "lossless"
    """How chunks are compressed; see storage.codecs."""
    chunk_tokens: int = 512
    """Tokens in a chunk, the unit of compression. Under 256 costs much of the ratio and many more requests."""
    shard_tokens: int = 2048
    """Tokens in a shard, the unit of writing (one file an array); a multiple of `chunk_tokens`."""

    def __post_init__(self) -> None:
        if not _SAFE_NAME.fullmatch(self.fingerprint):
            raise StoreError(
                f"fingerprint {self.fingerprint!r} must be 1-128 letters, digits, '_', '-' or '.': it names a folder"
            )
        ids = self.aux_layer_ids
        if len(ids) != NUM_AUX_LAYERS or min(ids) < 0 or list(ids) != sorted(set(ids)):
            raise StoreError(f"aux_layer_ids {ids} must be {NUM_AUX_LAYERS} rising 0-based layer numbers")
        for name in ("hidden_size", "vocab_size", "chunk_tokens", "shard_tokens"):
            if getattr(self, name) < 1:
                raise StoreError(f"{name} {getattr(self, name)} must be at least 1")
        if self.codec not in CODEC_NAMES:
            raise StoreError(f"codec {self.codec!r} is unknown; use one of {', '.join(CODEC_NAMES)}")
        if self.shard_tokens % self.chunk_tokens:
            raise StoreError(f"shard_tokens {self.shard_tokens} must be a multiple of chunk_tokens {self.chunk_tokens}")


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One conversation's tokens and the target's states on them. T tokens, D hidden size; T >= 1."""

    sample_id: str
    """Hash of token ids and loss mask."""
    token_ids: npt.NDArray[np.int32]
    """int32 [T]."""
    loss_mask: npt.NDArray[np.bool_]
    """bool [T], true where a token is supervised."""
    aux_hidden: npt.NDArray[np.uint16]
    """bf16 bits as uint16 [T, 3, D]; the layers low to high."""
    last_hidden: npt.NDArray[np.uint16]
    """bf16 bits as uint16 [T, D], after the target's final norm."""
    target_argmax: npt.NDArray[np.int32]
    """int32 [T], over the target's full vocabulary."""
    target_lse: npt.NDArray[np.float32]
    """float32 [T], logsumexp of the target's logits over its full vocabulary."""


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What a store holds, and what it costs. Bytes are bytes, not MB."""

    num_samples: int
    """Committed samples."""
    num_tokens: int
    """Tokens of the committed samples."""
    stored_bytes: int
    """Size of everything under the fingerprint's folder: states, metadata, index, and what killed writers left."""
    raw_bytes: int
    """Size of the committed samples' arrays without compression, padding or metadata."""


@dataclass(frozen=True, slots=True)
class ArraySchema:
    """One array of the store: [tokens, *row_shape]."""

    name: str
    """Name of the Zarr array and of the Sample's field."""
    dtype: str
    """Numpy name of the element type."""
    row_shape: tuple[int, ...]
    """Shape of one token's row."""
    chunk_row_shape: tuple[int, ...]
    """The part of a row that one chunk holds: layers are compressed apart, 1.51 against 1.43 x smaller than mixed."""
    fill_value: int | float | bool
    """What plain zarr shows where nothing was written."""
    meaning: str
    """One line for whoever finds the array."""

    @property
    def row_bytes(self) -> int:
        """Uncompressed bytes of one token's row."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.row_shape, dtype=np.int64))


def array_schemas(spec: StoreSpec) -> tuple[ArraySchema, ...]:
    """The six arrays of a store, in a fixed order."""
    hidden = spec.hidden_size
    over_vocabulary = "of the target's logits over its full vocabulary"
    return (
        ArraySchema(
            name="aux_hidden",
            dtype="uint16",
            row_shape=(NUM_AUX_LAYERS, hidden),
            chunk_row_shape=(1, hidden),
            fill_value=0xFFFF,
            meaning="bfloat16 bits: outputs of decoder layers aux_layer_ids, low to high; 65535 (NaN): unwritten",
        ),
        ArraySchema(
            name="last_hidden",
            dtype="uint16",
            row_shape=(hidden,),
            chunk_row_shape=(hidden,),
            fill_value=0xFFFF,
            meaning="bfloat16 bits: output of the target's final norm, its head's input; 65535 (NaN): unwritten",
        ),
        ArraySchema("token_ids", "int32", (), (), -1, "the target's token ids; -1: unwritten"),
        ArraySchema("loss_mask", "bool", (), (), False, "true where a token is supervised"),
        ArraySchema("target_argmax", "int32", (), (), -1, f"argmax {over_vocabulary}; -1: unwritten"),
        ArraySchema("target_lse", "float32", (), (), float("nan"), f"logsumexp {over_vocabulary}; NaN: unwritten"),
    )


def raw_bytes_per_token(spec: StoreSpec) -> int:
    """Uncompressed bytes of one token, all arrays together: 8 D + 13."""
    return sum(array.row_bytes for array in array_schemas(spec))


def attributes_of(spec: StoreSpec) -> dict[str, Any]:
    """What is written into the attributes of the store's group and of each segment's."""
    return {
        "format": FORMAT_NAME,
        "format_version": FORMAT_VERSION,
        "spec": dataclasses.asdict(spec),
        "meaning": {
            **{array.name: array.meaning for array in array_schemas(spec)},
            "rows": "one token a row; a sample is rows start_token to start_token + num_tokens of one segment, "
            "as ../index/*.jsonl says; rows that no index entry names are not data",
        },
    }


def spec_of(attributes: object, *, where: str) -> StoreSpec:
    """The spec written in a group's attributes. StoreError names `where` if they are not those of a store of ours."""
    if not isinstance(attributes, Mapping) or attributes.get("format") != FORMAT_NAME:
        raise StoreError(f"{where} is not a store of hidden states: its attributes do not say {FORMAT_NAME!r}")
    version = attributes.get("format_version")
    if version != FORMAT_VERSION:
        raise StoreError(f"{where} has format version {version!r}; this release reads {FORMAT_VERSION}")
    try:
        fields = dict(attributes["spec"])
        return StoreSpec(**{**fields, "aux_layer_ids": tuple(fields["aux_layer_ids"])})
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{where} holds an unreadable spec: {error}") from error


def require_same_spec(stored: StoreSpec, wanted: StoreSpec, *, where: str) -> None:
    """StoreError naming each field in which the stored spec differs from the wanted one, with both values."""
    differences = [
        f"{field.name} is {getattr(stored, field.name)!r} there, {getattr(wanted, field.name)!r} here"
        for field in dataclasses.fields(StoreSpec)
        if getattr(stored, field.name) != getattr(wanted, field.name)
    ]
    if differences:
        raise StoreError(
            f"{where} was written with another spec: {'; '.join(differences)}. "
            "Use the stored values or another store URL"
        )


def validate_sample(sample: Sample, spec: StoreSpec) -> None:
    """StoreError with the sample's id if a shape, dtype or value is not what the spec says (NaN and Inf included)."""
    if not _SAFE_NAME.fullmatch(sample.sample_id):
        raise StoreError(f"sample id {sample.sample_id!r} must be 1-128 letters, digits, '_', '-' or '.'")
    num_tokens = sample.token_ids.size
    if num_tokens < 1:
        raise StoreError(f"sample {sample.sample_id} has no tokens; drop it before capture")
    for array in array_schemas(spec):
        values: npt.NDArray[Any] = getattr(sample, array.name)
        want = (num_tokens, *array.row_shape)
        if values.shape != want or values.dtype != np.dtype(array.dtype):
            raise StoreError(
                f"sample {sample.sample_id}: {array.name} is {values.dtype} {list(values.shape)}, "
                f"the store needs {array.dtype} {list(want)}"
            )
    for name in ("aux_hidden", "last_hidden"):
        bits: npt.NDArray[np.uint16] = getattr(sample, name)
        magnitude = bits & _BF16_MAGNITUDE
        if magnitude.max() >= _BF16_EXPONENT:
            _refuse_not_finite(sample, name, np.nonzero(magnitude >= _BF16_EXPONENT)[0])
    if not np.isfinite(sample.target_lse).all():
        _refuse_not_finite(sample, "target_lse", np.nonzero(~np.isfinite(sample.target_lse))[0])
    for name in ("token_ids", "target_argmax"):
        ids: npt.NDArray[np.int32] = getattr(sample, name)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= spec.vocab_size:
            raise StoreError(
                f"sample {sample.sample_id}: {name} spans {low} to {high}, "
                f"the target's vocabulary has {spec.vocab_size} entries"
            )


def _refuse_not_finite(sample: Sample, name: str, bad_tokens: npt.NDArray[np.intp]) -> NoReturn:
    raise StoreError(
        f"sample {sample.sample_id}: {name} holds NaN or Inf in {len(np.unique(bad_tokens))} of "
        f"{sample.token_ids.size} tokens, the first at token {bad_tokens.min()}; the target overflowed: "
        "capture it in another dtype"
    )
