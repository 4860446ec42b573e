"""Makers of specs and random samples for the store's tests. (The S3 server is every test's: tests/conftest.py.)"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from storage.presets import PRESETS
from storage.schema import Sample, StoreSpec, TopK, target_rows

MakeSample = Callable[..., Sample]

BASE_SPEC = StoreSpec(
    fingerprint="0123abcd",
    target="tiny/target",
    aux_layer_ids=(1, 3, 5),
    hidden_size=8,
    vocab_size=50,
    encoding=PRESETS["lossless"],
    chunk_tokens=4,
    shard_tokens=8,
)


def spec_with(**changes: Any) -> StoreSpec:
    """The base spec with `changes`; `preset` names an encoding, with k small enough for the vocabulary."""
    if (preset := changes.pop("preset", None)) is not None:
        encoding = PRESETS[preset]
        changes["encoding"] = dataclasses.replace(encoding, top_k=5) if encoding.top_k else encoding
    return dataclasses.replace(BASE_SPEC, **changes)


def sample_of(sample_id: str, num_tokens: int, spec: StoreSpec = BASE_SPEC, *, seed: int = 0) -> Sample:
    """A random valid sample; the same arguments always give the same."""
    rng = np.random.default_rng([seed, num_tokens, *sample_id.encode()])
    loss_mask = rng.random(num_tokens) < 0.7
    num_targets = len(target_rows(loss_mask))

    def bf16_bits(*shape: int) -> npt.NDArray[np.uint16]:
        bits = rng.standard_normal(shape, dtype=np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16)

    last_hidden, top_k = bf16_bits(num_targets, spec.hidden_size), None
    if (k := spec.encoding.top_k) is not None:
        order = rng.permuted(np.tile(np.arange(spec.vocab_size, dtype=np.int32), (num_targets, 1)), axis=1)
        logits = rng.standard_normal((num_targets, k + 1))
        log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        top_k = TopK(np.ascontiguousarray(order[:, :k]), log_probabilities[:, :k].astype(np.float32))
    return Sample(
        sample_id=sample_id,
        token_ids=rng.integers(0, spec.vocab_size, num_tokens, dtype=np.int32),
        loss_mask=loss_mask,
        aux_hidden=bf16_bits(num_tokens, 3, spec.hidden_size),
        target_argmax=rng.integers(0, spec.vocab_size, num_targets, dtype=np.int32),
        target_lse=rng.standard_normal(num_targets, dtype=np.float32),
        last_hidden=last_hidden if top_k is None else None,
        top_k=top_k,
    )


def same(got: Sample, want: Sample) -> None:
    """Fail unless equal bit for bit, dtypes included, and ready for torch.from_numpy."""
    for name, left in arrays_of(got).items():
        right = arrays_of(want)[name]
        assert left.dtype == right.dtype, name
        assert left.shape == right.shape, name
        assert left.tobytes() == right.tobytes(), name
        assert left.flags.writeable, name  # torch.from_numpy warns otherwise
    assert got.sample_id == want.sample_id
    assert arrays_of(got).keys() == arrays_of(want).keys()


def arrays_of(sample: Sample) -> dict[str, npt.NDArray[Any]]:
    """Every array of a sample by the name of its field."""
    fields = {field.name: getattr(sample, field.name) for field in dataclasses.fields(Sample)}
    top_k = fields.pop("top_k")
    if top_k is not None:
        fields |= {"ids": top_k.ids, "log_probabilities": top_k.log_probabilities}
    return {name: value for name, value in fields.items() if name != "sample_id" and value is not None}


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., StoreSpec]:
    """make_spec(**changes): a spec with shards so small that a sample of ten tokens spans two; preset="near", say."""
    return spec_with


@pytest.fixture(scope="session")
def make_sample() -> MakeSample:
    """make_sample(sample_id, num_tokens, spec, seed): a random valid sample."""
    return sample_of


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Sample, Sample], None]:
    """assert_same(got, want): equal bit for bit, dtypes included, and ready for torch.from_numpy."""
    return same
