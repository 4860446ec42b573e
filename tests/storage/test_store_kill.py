"""A writer killed with SIGKILL at any moment: what it committed is there, nothing else is, and the next one goes on."""

from __future__ import annotations

import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from storage.reader import StoreReader
from storage.writer import StoreWriter

NUM_SAMPLES = 400
ROOT = Path(__file__).parents[2]

# Writes samples whose content follows from their number, and says after each that it is committed.
WRITER = f"""
import sys
import numpy as np
from storage.schema import Sample, StoreSpec
from storage.writer import StoreWriter

spec = StoreSpec("0123abcd", "tiny/target", (1, 3, 5), 8, 50, "lossless", 4, 8)

def sample(number):
    T, ramp = 1 + number % 20, np.arange(1 + number % 20)
    states = lambda *shape: np.full(shape, 0x3F00 + number, np.uint16)
    return Sample(
        f"s{{number}}", (ramp % 50).astype(np.int32), ramp % 2 == 0, states(T, 3, 8), states(T, 8),
        np.full(T, number % 50, np.int32), np.full(T, number, np.float32),
    )

if __name__ == "__main__":
    writer = StoreWriter(sys.argv[1], spec)
    for number in range({NUM_SAMPLES}):
        if f"s{{number}}" not in writer.committed():
            writer.write(sample(number))
            print(f"s{{number}}", flush=True)
"""


@pytest.fixture(scope="module")
def writer_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kill") / "writer_script.py"
    path.write_text(WRITER)
    return path


def start(script: Path, url: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script), str(url)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""},
    )


def file_checksums(url: Path) -> dict[Path, int]:
    return {path: zlib.crc32(path.read_bytes()) for path in url.rglob("*") if path.is_file()}


@pytest.mark.parametrize("num_kills", [3, pytest.param(40, marks=pytest.mark.soak)])
def test_kill_9_while_writing_then_go_on(tmp_path, writer_script, num_kills):
    # Red when a committed sample is lost or wrong, when a half-written one is visible, when the next writer starts
    # again from the beginning, or when it touches a file that was there before.
    url = tmp_path / "store"
    namespace: dict[str, object] = {"__name__": "writer_script"}
    exec(compile(WRITER, str(writer_script), "exec"), namespace)
    spec, sample = namespace["spec"], namespace["sample"]
    told: set[str] = set()
    for kill in range(num_kills):
        before = file_checksums(url)
        process = start(writer_script, url)
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(4)]
        time.sleep(0.013 * (1 + kill * 7 % 11))  # another point of the write each time
        process.kill()
        process.wait()
        lines += process.stdout.read().split()
        process.stdout.close()
        assert told.isdisjoint(lines)  # the writer went on: it wrote nothing that was committed before
        told |= set(lines)
        after = file_checksums(url)
        assert {path: after.get(path) for path in before} == before
        reader = StoreReader(str(url), spec)
        # One more may be committed than was said: the kill fell between the commit and the print.
        assert told <= reader.sample_ids()
        assert len(reader.sample_ids() - told) <= kill + 1
        for sample_id in reader.sample_ids():
            got, want = reader.read(sample_id), sample(int(sample_id[1:]))
            assert got.aux_hidden.tobytes() == want.aux_hidden.tobytes()
            assert got.target_lse.tobytes() == want.target_lse.tobytes()
        told = set(reader.sample_ids())
    with StoreWriter(str(url), spec) as writer:
        for number in range(60):
            writer.write(sample(number))
    reader = StoreReader(str(url), spec)
    assert {f"s{number}" for number in range(60)} <= reader.sample_ids()
    for number in range(60):
        assert reader.read(f"s{number}").last_hidden.tobytes() == sample(number).last_hidden.tobytes()
