"""How much memory a writer and a reader take, measured in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROCESS = """
import resource, sys
import numpy as np
from storage.presets import PRESETS
from storage.reader import StoreReader
from storage.schema import Sample, StoreSpec, target_rows
from storage.writer import StoreWriter

action, url, preset, num_tokens, hidden = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
spec = StoreSpec("f", "t", (0, 1, 2), hidden, 1000, encoding=PRESETS[preset])
if action == "write":
    rng = np.random.default_rng(0)
    mask = np.ones(num_tokens, bool)
    rows = len(target_rows(mask))
    noise = (rng.standard_normal((256, 3, hidden), dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    aux = np.tile(noise, (num_tokens // 256, 1, 1))
    last = np.ascontiguousarray(aux[:rows, 0])
    zeros = np.zeros(rows, np.int32)
    sample = Sample("a", np.zeros(num_tokens, np.int32), mask, aux, zeros, zeros.astype(np.float32), last)
    with StoreWriter(url, spec) as writer:
        writer.write(sample)
elif action == "read":
    with StoreReader(url, spec) as reader:
        assert reader.read("a").aux_hidden.shape == (num_tokens, 3, hidden)
elif action == "prefetch":
    with StoreReader(url, spec) as reader:
        for encoded in reader.prefetch([("a", 0, None)] * 6, max_bytes=1):
            assert encoded.stop == num_tokens
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak_bytes(action: str, url: Path, preset: str, num_tokens: int, hidden: int) -> int:
    arguments = [sys.executable, "-c", PROCESS, action, str(url), preset, str(num_tokens), str(hidden)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return int(subprocess.run(arguments, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE).stdout)


@pytest.mark.parametrize("preset", ["lossless", "near"])
def test_memory_is_a_small_multiple_of_the_sample(tmp_path, preset):
    # Red when encoding, compression or decoding copies the sample once more. Bytes above an idle process, for a
    # sample of 134 MB: the sample itself, its codes and what of them is compressed.
    idle = peak_bytes("nothing", tmp_path, preset, 0, 1)
    sample = 4096 * 8 * 2048 * 2
    assert peak_bytes("write", tmp_path, preset, 4096 * 2, 2048) - idle < 3.2 * sample
    assert peak_bytes("read", tmp_path, preset, 4096 * 2, 2048) - idle < 3.2 * sample


@pytest.mark.soak
@pytest.mark.parametrize("preset", ["lossless", "near"])
def test_a_sample_of_16k_tokens_of_4096_takes_less_than_one_and_a_half_gigabytes(tmp_path, preset):
    # Red when writer or reader do not fit beside a target: 537 MB of states, of which the caller of prefetch holds one
    # sample's while the next is read.
    for action in ("write", "read", "prefetch"):
        assert peak_bytes(action, tmp_path, preset, 16_384, 4096) < 1.5e9, action
