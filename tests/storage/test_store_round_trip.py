"""Any layout, any length and extreme bit patterns come back bit for bit, from disk and from memory."""

from __future__ import annotations

import dataclasses
import uuid

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.codecs import CODEC_NAMES
from storage.encoding import round_trip
from storage.presets import PRESETS, Encoding
from storage.reader import StoreReader
from storage.writer import StoreWriter

LOSSLESS = [Encoding(aux_step=None, last="hidden", codec=codec, level=int(codec != "raw")) for codec in CODEC_NAMES]
LOSSY = [PRESETS["near"], dataclasses.replace(PRESETS["tiny"], top_k=3)]


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    in_memory=st.booleans(),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    hidden_size=st.integers(1, 9),
    chunk_tokens=st.integers(1, 9),
    chunks_per_shard=st.integers(1, 4),
    encoding=st.sampled_from([*LOSSLESS, *LOSSY]),
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
    encoding,
    bits,
):
    # Red when a layout (ragged, one token, wider than a shard) or an extreme bf16 pattern (zeros, negative zero,
    # subnormal, largest) does not survive. The writer is opened twice: two segments in one store.
    spec = make_spec(
        fingerprint=uuid.uuid4().hex,
        hidden_size=hidden_size,
        chunk_tokens=chunk_tokens,
        shard_tokens=chunk_tokens * chunks_per_shard,
        encoding=encoding,
    )
    url = "memory://round-trip" if in_memory else str(tmp_path)
    samples = [make_sample(f"s{i}", length, spec) for i, length in enumerate(lengths)]
    samples[0].aux_hidden[:, 1] = bits
    expected = {}
    for half in (samples[::2], samples[1::2]):
        with StoreWriter(url, spec) as writer:
            for sample in half:
                writer.write(sample)
            writer.flush()
            expected |= {sample.sample_id: round_trip(sample, spec, writer.statistics) for sample in half}
    with StoreReader(url, spec) as reader:
        assert reader.sample_ids() == expected.keys()
        for sample in samples:
            assert_same(reader.read(sample.sample_id), expected[sample.sample_id])
            if encoding.lossless:
                assert_same(reader.read(sample.sample_id), sample)
