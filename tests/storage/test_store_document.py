"""docs/store.md is enough to read a store: plain zarr, json and numpy, nothing of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr

from storage.presets import PRESETS
from storage.reader import StoreReader
from storage.writer import StoreWriter


def read_by_the_document(folder: Path, sample_id: str) -> dict[str, Any]:
    """One sample of the fingerprint's folder, by the rules of docs/store.md alone."""
    lines = [line for file in sorted((folder / "index").glob("*.jsonl")) for line in file.read_bytes().splitlines()]
    [entry] = [entry for entry in map(parse_line, lines) if entry["sample_id"] == sample_id]
    group = zarr.open_group(folder / "states" / entry["segment"], mode="r")
    spec = group.attrs["spec"]
    hidden, encoding = spec["hidden_size"], spec["encoding"]

    def rows(array: str, axis: str) -> Any:
        first, number = entry["rows"][axis]
        return group[array][first : first + number]

    tokens = rows("tokens", "tokens")
    num_tokens = len(tokens)
    mask = tokens[:, 1] == 1
    targets = [q for q in range(1, num_tokens - 1) if mask[q] and mask[q + 1]]
    found = {
        "token_ids": tokens[:, 0],
        "loss_mask": mask,
        "target_argmax": tokens[targets, 2],
        "target_lse": tokens[targets, 3].copy().view(np.float32),
    }
    values = [states(group, rows, "aux", "tokens", hidden).reshape(-1)]
    if encoding["last"] == "hidden":
        values.append(states(group, rows, "last", "targets", hidden).reshape(-1))
    flat = np.concatenate(values)
    if encoding["aux_step"] is not None or encoding["last_step"] is not None:
        distances, words = rows("exceptions", "exceptions").astype(np.int64).T
        for number, word in zip(np.cumsum(distances), words, strict=True):
            layer, channel = number // hidden % 3, number % hidden
            is_aux = number < num_tokens * 3 * hidden
            sink = group["aux_sink"][layer, channel] if is_aux else group["last_sink"][channel]
            flat[number] = word if word < 65536 else (word - 65536) ^ int(sink)
    found["aux_hidden"] = flat[: num_tokens * 3 * hidden].reshape(num_tokens, 3, hidden)
    if encoding["last"] == "hidden":
        found["last_hidden"] = flat[num_tokens * 3 * hidden :].reshape(len(targets), hidden)
        return found
    planes = rows("topk", "targets").astype(np.int64)
    levels, tail = planes[:, 0], tokens[targets, 4]
    num_bytes = max(2, -(-(spec["vocab_size"] - 1).bit_length() // 8))
    assert planes.shape[1] == 1 + num_bytes
    found["ids"] = np.cumsum(sum(planes[:, 1 + byte] * 256**byte for byte in range(num_bytes)), axis=1)
    mass = np.where(tail == -32768, 1, 1 / (1 + np.exp(tail / 256)))
    found["log_probabilities"] = np.log(mass)[:, None] + levels / 8 - np.log(np.exp(levels / 8).sum(1))[:, None]
    return found


def parse_line(line: bytes) -> dict[str, Any]:
    body = line[line.index(b'"entry": ') + len(b'"entry": ') : -1]
    document = json.loads(line)
    assert google_crc32c.value(body) == int(document["crc32c"], 16)
    entry: dict[str, Any] = document["entry"]
    return entry


def states(group: Any, rows: Any, what: str, axis: str, hidden: int) -> Any:
    """bfloat16 bits, before exceptions."""
    [name] = [
        name
        for name in group.array_keys()
        if name in {f"{what}_{form}" for form in ("planes", "bits", "codes", "pairs")}
    ]
    array = rows(name, axis)
    if name.endswith("planes"):
        p, q = array[..., 0, :].astype(np.int64), array[..., 1, :].astype(np.int64)
        return ((q >> 7) * 32768 + (((q >> 6) % 2) * 16384 + p * 64 + q % 64 + 3968) % 32768).astype(np.uint16)
    if name.endswith("bits"):
        return array
    if name.endswith("pairs"):
        codes = np.stack([array % 15, array // 15], axis=-1).astype(np.float32) - 7
        codes = codes.reshape(*array.shape[:-1], -1)[..., :hidden]
    else:
        codes = array.astype(np.float32)
    value = codes * group[f"{what}_scale"][...]
    value = value + group[f"{what}_offset"][...]
    assert value.dtype == np.float32
    word = value.view(np.uint32)
    return ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("hidden_size", [8, 7])
@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_store_is_read_by_its_document(tmp_path, make_spec, make_sample, preset, hidden_size):
    # Red when the format changes and the document (and its version) does not.
    spec = make_spec(preset=preset, hidden_size=hidden_size, vocab_size=70_000 if preset == "tiny" else 50)
    samples = [make_sample(f"s{i}", 5 + 11 * i, spec) for i in range(4)]
    for sample in samples:
        sample.aux_hidden[0, 1] = 0x7000  # a sink
    with StoreWriter(str(tmp_path), spec) as writer:
        for sample in samples:
            writer.write(sample)
    with StoreReader(str(tmp_path), spec) as reader:
        for sample in samples:
            want = reader.read(sample.sample_id)
            got = read_by_the_document(tmp_path / spec.fingerprint, sample.sample_id)
            for name in ("token_ids", "loss_mask", "target_argmax", "target_lse", "aux_hidden"):
                np.testing.assert_array_equal(got[name], getattr(want, name), err_msg=name)
            if want.top_k is None:
                np.testing.assert_array_equal(got["last_hidden"], want.last_hidden)
            else:
                np.testing.assert_array_equal(got["ids"], want.top_k.ids)
                np.testing.assert_allclose(got["log_probabilities"], want.top_k.log_probabilities, rtol=1e-6, atol=1e-6)


def test_the_document_names_every_array_and_field():
    text = (Path(__file__).parents[2] / "docs" / "store.md").read_text(encoding="utf-8")
    arrays = ("tokens", "topk", "exceptions", "planes", "bits", "codes", "pairs")
    statistics = ("aux_norm", "aux_sink", "calibration_tokens")
    for word in (*arrays, *statistics, "tokens_crc32c", "chunk_tokens", "last_step", "version 2"):
        assert word in text, word


def test_metadata_carries_its_checksum_as_the_document_says(tmp_path, make_spec, make_sample):
    # Red when the rule for attributes["crc32c"] changes, or a document goes without.
    spec = make_spec(preset="near")
    with StoreWriter(str(tmp_path), spec) as writer:
        writer.write(make_sample("a", 9))
    documents = sorted((tmp_path / spec.fingerprint / "states").rglob("zarr.json"))
    assert len(documents) > 4
    for path in documents:
        document = json.loads(path.read_bytes())
        found = document["attributes"].pop("crc32c")
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        assert found == f"{google_crc32c.value(text.encode()):08x}", path
