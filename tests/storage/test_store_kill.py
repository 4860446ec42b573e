"""A writer killed with SIGKILL at any moment: what it committed is there, nothing else is, and the next one goes on.

Samples are made by tests/storage/conftest.py from their number alone, in the writer's process and here.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.encoding import round_trip
from storage.location import locate
from storage.reader import StoreReader
from storage.schema import Sample, StoreSpec
from storage.verify import verify
from storage.writer import StoreWriter
from tests.storage.conftest import arrays_of, same, sample_of, spec_with

NUM_SAMPLES = 60
ROOT = Path(__file__).parents[2]

WRITER = """
import sys
from storage.writer import StoreWriter
from tests.storage.test_store_kill import NUM_SAMPLES, SPECS, sample

if __name__ == "__main__":
    url, preset = sys.argv[1:]
    writer = StoreWriter(url, SPECS[preset], calibration_tokens=40)
    print("open", flush=True)
    committed = writer.committed()
    for number in range(NUM_SAMPLES):
        if f"s{number}" not in committed:
            writer.write(sample(number, preset))
            if number % 5 == 0:
                writer.flush()
                print(f"s{number}", flush=True)
    writer.close()
    print("closed", flush=True)
"""
SPECS: dict[str, StoreSpec] = {preset: spec_with(preset=preset, hidden_size=64) for preset in ("lossless", "near")}


def sample(number: int, preset: str) -> Sample:
    return sample_of(f"s{number}", 1 + 7 * number % 40, SPECS[preset])


def start(url: str, preset: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, url, preset],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def checksums(url: str) -> dict[str, int]:
    """CRC-32 of every file of committed samples and metadata, by name."""
    place = locate(url)
    names = [name for name in place.sizes() if ".partial" not in name and "/claims/" not in name]
    return {name: zlib.crc32(place.read_bytes(name) or b"") for name in names}


def kill_and_go_on(url: str, preset: str, num_kills: int, *, seed: int) -> None:
    draw = random.Random(seed)
    spec = SPECS[preset]
    told: set[str] = set()
    kills = 0
    while kills < num_kills:
        before = checksums(url)
        process = start(url, preset)
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        time.sleep(draw.uniform(0, 0.25))
        process.kill()
        process.wait()
        lines = set(process.stdout.read().split())
        process.stdout.close()
        kills += 1
        assert told.isdisjoint(lines)  # the writer went on: it wrote nothing that was committed before
        told |= lines - {"closed"}
        after = checksums(url)
        assert {name: after.get(name) for name in before} == before  # nothing that was there is touched
        with StoreReader(url, spec) as reader:
            held = reader.sample_ids()
            assert told <= held
            # In the order of writing: what is there is the beginning.
            assert held == {f"s{number}" for number in range(len(held))}
        assert verify(url, spec.fingerprint).faults == ()
        told = set(held)
        if "closed" in lines:  # start again, with a store to kill
            for name in locate(url).sizes():
                locate(url).delete(name)
            told = set()


def complete_and_compare(url: str, preset: str, fresh: Callable[[], str]) -> None:
    """Finish what was killed; every sample must read as from a capture that nothing disturbed."""
    spec = SPECS[preset]
    undisturbed = fresh()
    for place in (url, undisturbed):
        process = start(place, preset)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert output.split()[-1] == "closed"
    with StoreReader(url, spec) as reader, StoreReader(undisturbed, spec) as other:
        assert reader.sample_ids() == other.sample_ids() == {f"s{number}" for number in range(NUM_SAMPLES)}
        for number in range(NUM_SAMPLES):
            same(reader.read(f"s{number}"), other.read(f"s{number}"))
            if spec.encoding.lossless:
                same(reader.read(f"s{number}"), sample(number, preset))
    assert verify(url, spec.fingerprint).faults == ()


@pytest.mark.parametrize("preset", SPECS)
@pytest.mark.parametrize("num_kills", [2, pytest.param(25, marks=pytest.mark.soak)])
def test_kill_9_on_a_local_disk_then_go_on(tmp_path, preset, num_kills):
    # Red when a committed sample is lost or wrong, a half-written one is visible, the next writer starts again from the
    # beginning or touches a file that was there, or what comes out differs from a capture that nothing disturbed.
    kill_and_go_on(str(tmp_path / "store"), preset, num_kills, seed=num_kills)
    complete_and_compare(str(tmp_path / "store"), preset, lambda: str(tmp_path / "undisturbed"))


@pytest.mark.parametrize("preset", SPECS)
@pytest.mark.parametrize("num_kills", [2, pytest.param(25, marks=pytest.mark.soak)])
def test_kill_9_on_s3_then_go_on(s3, preset, num_kills):
    # Red as on a local disk.
    url = s3.new_url()
    kill_and_go_on(url, preset, num_kills, seed=num_kills)
    complete_and_compare(url, preset, s3.new_url)


def test_samples_are_the_same_in_every_process():
    # Red when the comparison above compares what differs for another reason.
    code = (
        "import zlib; from tests.storage.test_store_kill import *; "
        "print(zlib.crc32(b''.join(a.tobytes() for a in arrays_of(sample(7, 'near')).values())))"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    here = zlib.crc32(b"".join(values.tobytes() for values in arrays_of(sample(7, "near")).values()))
    assert int(output) == here


def test_a_writer_calibrates_alike_again(tmp_path):
    # Red when the statistics of the same samples depend on threads or time: resumed captures would differ.
    results = []
    for name in ("a", "b"):
        with StoreWriter(str(tmp_path / name), SPECS["near"], calibration_tokens=40) as writer:
            for number in range(4):
                writer.write(sample(number, "near"))
            writer.flush()
            results.append(round_trip(sample(3, "near"), SPECS["near"], writer.statistics))
    same(*results)
