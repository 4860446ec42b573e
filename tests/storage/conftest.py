"""Makers of specs and random samples for the store's tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from storage.schema import Sample, StoreSpec

MakeSample = Callable[..., Sample]

BASE_SPEC = StoreSpec(
    fingerprint="0123abcd",
    target="tiny/target",
    aux_layer_ids=(1, 3, 5),
    hidden_size=8,
    vocab_size=50,
    codec="lossless",
    chunk_tokens=4,
    shard_tokens=8,
)


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., StoreSpec]:
    """make_spec(**changes): a spec with shards so small that a sample of ten tokens spans two."""

    def make(**changes: Any) -> StoreSpec:
        return dataclasses.replace(BASE_SPEC, **changes)

    return make


@pytest.fixture(scope="session")
def make_sample() -> MakeSample:
    """make_sample(sample_id, num_tokens, spec, seed): a random valid sample."""

    def make(sample_id: str, num_tokens: int, spec: StoreSpec = BASE_SPEC, *, seed: int = 0) -> Sample:
        rng = np.random.default_rng([seed, num_tokens, *sample_id.encode()])

        def bf16_bits(*shape: int) -> npt.NDArray[np.uint16]:
            bits = rng.standard_normal(shape, dtype=np.float32).view(np.uint32) >> 16
            return bits.astype(np.uint16)

        return Sample(
            sample_id=sample_id,
            token_ids=rng.integers(0, spec.vocab_size, num_tokens, dtype=np.int32),
            loss_mask=rng.random(num_tokens) < 0.5,
            aux_hidden=bf16_bits(num_tokens, 3, spec.hidden_size),
            last_hidden=bf16_bits(num_tokens, spec.hidden_size),
            target_argmax=rng.integers(0, spec.vocab_size, num_tokens, dtype=np.int32),
            target_lse=rng.standard_normal(num_tokens, dtype=np.float32),
        )

    return make


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Sample, Sample], None]:
    """assert_same(got, want): equal bit for bit, dtypes included, and ready for torch.from_numpy."""

    def check(got: Sample, want: Sample) -> None:
        for field in dataclasses.fields(Sample):
            left, right = getattr(got, field.name), getattr(want, field.name)
            if field.name == "sample_id":
                assert left == right
            else:
                assert left.dtype == right.dtype, field.name
                assert left.shape == right.shape, field.name
                assert left.tobytes() == right.tobytes(), field.name
                assert left.flags.writeable, field.name  # torch.from_numpy warns otherwise

    return check
