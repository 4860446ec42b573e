"""What the benchmark says of a store is what the store is."""

from __future__ import annotations

import dataclasses
import http.server
import threading
import time
import urllib.request

import numpy as np
import pytest

from storage.bench.delay import delayed
from storage.bench.measure import Captured, array_ratios, gaussian_sample, num_gets, preset_figures
from storage.errors import StoreError
from storage.presets import PRESETS
from storage.reader import StoreReader
from storage.schema import StoreSpec, TopK, target_rows
from storage.writer import StoreWriter

SPEC = StoreSpec("bench", "t", (1, 2, 3), 32, 1000, chunk_tokens=64, shard_tokens=128)


@pytest.fixture(scope="module")
def captured() -> list[Captured]:
    """Three samples of normal states, with 256 tokens of each target."""
    found = []
    for number in range(3):
        one = gaussian_sample(200 + number, SPEC.hidden_size, SPEC.vocab_size)
        rows = len(target_rows(one.sample.loss_mask))
        ids = np.tile(np.arange(256, dtype=np.int32), (rows, 1))
        top_k = TopK(ids, np.full(ids.shape, np.log(1 / 300), np.float32))
        found.append(Captured(dataclasses.replace(one.sample, sample_id=f"s{number}"), top_k))
    return found


def test_every_preset_is_measured(captured, tmp_path):
    figures = {
        (variant, metric): value for variant, metric, value in preset_figures(captured, SPEC, str(tmp_path), rounds=1)
    }
    for preset in PRESETS:
        for metric in ("ratio", "beside", "write MB/s", "read MB/s", "codes MB/s", "latency ms", "GETs", "gpu share"):
            assert figures[preset, metric] > 0
    assert figures["small", "topk bytes"] > figures["tiny", "topk bytes"] > 0
    assert figures["lossless", "gpu share"] == 1
    assert 0.5 <= figures["near", "gpu share"] < 0.56
    assert 0 < figures["near", "beside"] < 1


def test_steps_save_what_their_entropy_says(captured, tmp_path):
    # Normal values in steps of s deviations have 2.05 - log2(s) bits; 16 of bfloat16. Padding and tables cost the rest.
    ratios = {variant: value for variant, _, value in array_ratios(captured, SPEC, str(tmp_path))}
    for step in (0.1, 0.3):
        assert 0.75 < ratios[f"aux step {step:g}"] / (16 / (2.05 - np.log2(step))) < 1.02
    assert ratios["aux step 0.8"] > ratios["aux step 0.5"] > ratios["aux step 0.3"] > ratios["aux lossless"]


def test_requests_are_counted_as_the_reader_makes_them(tmp_path, monkeypatch):
    spec = dataclasses.replace(SPEC, encoding=PRESETS["near"])
    one = gaussian_sample(300, spec.hidden_size, spec.vocab_size)
    with StoreWriter(str(tmp_path), spec) as writer:
        writer.write(one.sample)
    with StoreReader(str(tmp_path), spec) as reader:
        reader.read_encoded("gaussian")  # the segment's metadata, once
        names: list[str] = []
        read = type(reader._states).read_bytes

        def counting(self, name, *arguments):
            names.append(name)
            return read(self, name, *arguments)

        monkeypatch.setattr(type(reader._states), "read_bytes", counting)
        reader.read_encoded("gaussian")
        assert len(names) == num_gets(reader, "gaussian") == 3 + 3 + 1 + 1


def test_a_delayed_request_takes_that_much_longer_and_arrives_whole():
    # Not a timing assert of ours: the delay is what the proxy is for.
    body = bytes(range(256)) * 4096

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with delayed(f"http://127.0.0.1:{server.server_port}", 0.2) as url:
            started = time.monotonic()
            with urllib.request.urlopen(url) as answer:
                assert answer.read() == body
            assert time.monotonic() - started >= 0.2
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    with pytest.raises(StoreError, match="http:// endpoint only"), delayed("https://s3.example.com", 0.1):
        pass
