"""What a writer refuses: a sample that is not what the spec says, before a byte of it is encoded.

Targets that overflow write NaN without a word, and a draft that trains on it learns nothing: it is refused here, where
the sample's id is still known. The price is a pass over the states (~5 GB/s).
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from storage.errors import StoreError
from storage.schema import NUM_AUX_LAYERS, SAFE_NAME, Sample, StoreSpec, TopK, target_rows

_BF16_EXPONENT = np.uint16(0x7F80)
_BF16_MAGNITUDE = np.uint16(0x7FFF)
# Log-probabilities come from the target's own float32 log-sum-exp: their sum passes 1 by rounding, no more.
_MASS_SLACK = 1e-3


def validate_sample(sample: Sample, spec: StoreSpec) -> None:
    """StoreError with the sample's id if a shape, dtype or value is not what the spec says (NaN and Inf included)."""
    if not SAFE_NAME.fullmatch(sample.sample_id):
        raise StoreError(f"sample id {sample.sample_id!r} must be 1-128 letters, digits, '_', '-' or '.'")
    num_tokens = sample.token_ids.size
    if num_tokens < 1:
        raise StoreError(f"sample {sample.sample_id} has no tokens; drop it before capture")
    _require_array(sample, "token_ids", sample.token_ids, "int32", (num_tokens,))
    _require_array(sample, "loss_mask", sample.loss_mask, "bool", (num_tokens,))
    num_targets = len(target_rows(sample.loss_mask))
    hidden = spec.hidden_size
    _require_array(sample, "aux_hidden", sample.aux_hidden, "uint16", (num_tokens, NUM_AUX_LAYERS, hidden))
    _require_array(sample, "target_argmax", sample.target_argmax, "int32", (num_targets,))
    _require_array(sample, "target_lse", sample.target_lse, "float32", (num_targets,))
    if spec.encoding.last == "hidden":
        if sample.last_hidden is None or sample.top_k is not None:
            raise StoreError(f"sample {sample.sample_id}: the store needs last_hidden, and no top_k")
        _require_array(sample, "last_hidden", sample.last_hidden, "uint16", (num_targets, hidden))
        _require_finite_bits(sample, "last_hidden", sample.last_hidden)
    else:
        if sample.top_k is None or sample.last_hidden is not None:
            raise StoreError(f"sample {sample.sample_id}: the store needs top_k, and no last_hidden")
        assert spec.encoding.top_k is not None
        shape = (num_targets, spec.encoding.top_k)
        _require_array(sample, "top_k.ids", sample.top_k.ids, "int32", shape)
        _require_array(sample, "top_k.log_probabilities", sample.top_k.log_probabilities, "float32", shape)
        _require_top_k(sample, sample.top_k, spec)
    _require_finite_bits(sample, "aux_hidden", sample.aux_hidden)
    if not np.isfinite(sample.target_lse).all():
        _refuse_not_finite(sample, "target_lse", np.nonzero(~np.isfinite(sample.target_lse))[0])
    _require_ids(sample, "token_ids", sample.token_ids, spec)
    _require_ids(sample, "target_argmax", sample.target_argmax, spec)


def _require_array(sample: Sample, name: str, values: npt.NDArray[Any], dtype: str, shape: tuple[int, ...]) -> None:
    if values.shape != shape or values.dtype != np.dtype(dtype):
        raise StoreError(
            f"sample {sample.sample_id}: {name} is {values.dtype} {list(values.shape)}, "
            f"the store needs {dtype} {list(shape)}"
        )


def _require_ids(sample: Sample, name: str, ids: npt.NDArray[np.int32], spec: StoreSpec) -> None:
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= spec.vocab_size):
        raise StoreError(
            f"sample {sample.sample_id}: {name} spans {ids.min()} to {ids.max()}, "
            f"the target's vocabulary has {spec.vocab_size} entries"
        )


def _require_top_k(sample: Sample, top_k: TopK, spec: StoreSpec) -> None:
    _require_ids(sample, "top_k.ids", top_k.ids, spec)
    log_probabilities = top_k.log_probabilities
    if not np.isfinite(log_probabilities).all():
        _refuse_not_finite(sample, "top_k.log_probabilities", np.nonzero(~np.isfinite(log_probabilities))[0])
    if log_probabilities.size == 0:
        return
    if (np.diff(np.sort(top_k.ids, axis=1), axis=1) == 0).any():
        raise StoreError(f"sample {sample.sample_id}: top_k.ids names a token twice in a row")
    mass = float(np.exp(log_probabilities, dtype=np.float64).sum(axis=1).max())
    if mass > 1 + _MASS_SLACK:
        raise StoreError(
            f"sample {sample.sample_id}: top_k.log_probabilities sum to a mass of {mass:.4f} in a row; they must be "
            "taken over the full vocabulary"
        )


def _require_finite_bits(sample: Sample, name: str, bits: npt.NDArray[np.uint16]) -> None:
    magnitude = bits & _BF16_MAGNITUDE
    if bits.size and magnitude.max() >= _BF16_EXPONENT:
        _refuse_not_finite(sample, name, np.nonzero(magnitude >= _BF16_EXPONENT)[0])


def _refuse_not_finite(sample: Sample, name: str, bad_rows: npt.NDArray[np.intp]) -> NoReturn:
    raise StoreError(
        f"sample {sample.sample_id}: {name} holds NaN or Inf in {len(np.unique(bad_rows))} rows of "
        f"{sample.token_ids.size} tokens, the first in row {bad_rows.min()}; the target overflowed: "
        "capture it in another dtype"
    )
