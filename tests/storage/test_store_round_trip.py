"""Any layout, any length and extreme bit patterns come back bit for bit, from disk and from memory."""

from __future__ import annotations

import uuid

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.reader import StoreReader
from storage.writer import StoreWriter


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    in_memory=st.booleans(),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    hidden_size=st.integers(1, 9),
    chunk_tokens=st.integers(1, 9),
    chunks_per_shard=st.integers(1, 4),
    codec=st.sampled_from(["lossless", "raw"]),
    bits=st.sampled_from([0x0000, 0x8000, 0x0001, 0x7F7F, 0xFF7F]),
)
def test_any_layout_comes_back(
    tmp_path,
    make_spec,
    make_sample,
    assert_same,
    in_memory,
    lengths,
    hidden_size,
    chunk_tokens,
    chunks_per_shard,
    codec,
    bits,
):
    # Red when a layout (ragged, one token, wider than a shard) or an extreme bf16 pattern (zeros, negative zero,
    # subnormal, largest) does not survive. The writer is opened twice: two segments in one store.
    spec = make_spec(
        fingerprint=uuid.uuid4().hex,
        hidden_size=hidden_size,
        chunk_tokens=chunk_tokens,
        shard_tokens=chunk_tokens * chunks_per_shard,
        codec=codec,
    )
    url = "memory://round-trip" if in_memory else str(tmp_path)
    samples = [make_sample(f"s{i}", length, spec) for i, length in enumerate(lengths)]
    samples[0].last_hidden[:] = bits
    for half in (samples[::2], samples[1::2]):
        with StoreWriter(url, spec) as writer:
            for sample in half:
                writer.write(sample)
    reader = StoreReader(url, spec)
    assert reader.sample_ids() == {sample.sample_id for sample in samples}
    for sample in samples:
        assert_same(reader.read(sample.sample_id), sample)
