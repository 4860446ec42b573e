"""A server that is slow, refuses, hangs up, or restarts: the store ends up complete, or says in one line what is wrong.

Everything goes through the fault proxy to a real S3 server.
"""

from __future__ import annotations

import threading
import time

import pytest

from storage.encoding import round_trip
from storage.errors import StoreError
from storage.reader import StoreReader
from storage.writer import StoreWriter

NAMES = [f"s{i}" for i in range(24)]


def write_all(url, spec, make_sample, *, pause: float = 0.0) -> dict:
    with StoreWriter(url, spec) as writer:
        for i, name in enumerate(NAMES):
            writer.write(make_sample(name, 5 + i, spec))
            time.sleep(pause)
        writer.flush()
        return {
            name: round_trip(make_sample(name, 5 + i, spec), spec, writer.statistics) for i, name in enumerate(NAMES)
        }


def read_all(url, spec, expected, assert_same) -> None:
    with StoreReader(url, spec) as reader:
        assert reader.sample_ids() == set(NAMES)
        for name in NAMES:
            assert_same(reader.read(name), expected[name])
        assert [encoded.sample_id for encoded in reader.prefetch([(name, 0, None) for name in NAMES])] == NAMES


@pytest.mark.parametrize("preset", ["lossless", "near", "small"])
def test_five_percent_of_requests_fail(s3, preset, make_spec, make_sample, assert_same):
    # Red when a 503, a closed connection or half an answer loses a sample or stops the run.
    url, spec = s3.new_url(), make_spec(preset=preset)
    s3.set(refuse=0.03, hang_up=0.01, cut=0.01, latency=0.002, seed=5)
    expected = write_all(url, spec, make_sample)
    faults = s3.set(refuse=0.03, hang_up=0.01, cut=0.01, latency=0.002, seed=6)
    read_all(url, spec, expected, assert_same)
    assert len(faults.requests) > 100  # so that some did fail


def test_many_requests_are_under_way_at_once(s3, make_spec, make_sample, assert_same):
    # Red when requests wait for each other: 40 ms each, one after another, would be 9 s and more. No time is measured:
    # the proxy counts the requests that wait beside each other.
    url, spec = s3.new_url(), make_spec()
    expected = write_all(url, spec, make_sample)
    s3.set(latency=0.04)
    read_all(url, spec, expected, assert_same)
    assert s3.proxy.most_at_once >= 8


def test_the_server_restarts_while_a_capture_and_a_reader_are_at_work(s3, make_spec, make_sample, assert_same):
    # Red when a restart of seconds ends a capture of hours, loses a sample, or gives a reader anything but its samples.
    url, spec = s3.new_url(), make_spec(preset="near")

    def restart() -> threading.Thread:
        def work() -> None:
            time.sleep(0.3)
            s3.server.stop()
            s3.server.start()

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    restarting = restart()
    expected = write_all(url, spec, make_sample, pause=0.05)
    restarting.join()
    read_all(url, spec, expected, assert_same)
    restarting = restart()
    with StoreReader(url, spec) as reader:
        for name in NAMES:
            assert_same(reader.read(name), expected[name])
            time.sleep(0.05)
    restarting.join()


def test_a_server_that_stays_away_is_one_line_and_what_is_committed_is_good(
    s3, make_spec, make_sample, assert_same, monkeypatch
):
    # Red when a writer waits without end, the message is a traceback, or the committed samples are lost.
    monkeypatch.setattr("storage.retry.RETRY_SECONDS", 0.5)
    url, spec = s3.new_url(), make_spec()
    writer = StoreWriter(url, spec)
    writer.write(make_sample("a", 9, spec))
    writer.flush()
    s3.set(refuse=1.0)
    writer.write(make_sample("b", 9, spec))
    with pytest.raises(StoreError, match=r"sample b cannot be written to s3://.*: injected; it did not pass") as failed:
        writer.close()
    assert "\n" not in str(failed.value)
    with pytest.raises(StoreError, match="cannot be read: injected"):
        StoreReader(url, spec)
    s3.set()
    with StoreReader(url, spec) as reader:
        assert reader.sample_ids() == {"a"}
        assert_same(reader.read("a"), make_sample("a", 9, spec))
        s3.set(refuse=1.0, only="GET")
        with pytest.raises(StoreError, match=r"sample a: .* cannot be read: .*injected") as failed:
            reader.read("a")
        assert type(failed.value) is StoreError  # no DamageError: a repair must not drop it


def test_no_credential_is_stored_or_told(s3, make_spec, make_sample):
    # Red when the secret that a writer used can be found in what it wrote.
    from storage.location import locate
    from tests.storage.s3_server import ACCESS_KEY, SECRET_KEY

    url, spec = s3.new_url(), make_spec()
    write_all(url, spec, make_sample)
    place = locate(url)
    for name in place.sizes():
        content = place.read_bytes(name) or b""
        assert SECRET_KEY.encode() not in content
        assert ACCESS_KEY.encode() not in content
