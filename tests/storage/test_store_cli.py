"""`eyas store` as a user calls it."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from storage.cli import app
from storage.encoding import round_trip
from storage.presets import PRESETS
from storage.quantise import calibrate
from storage.reader import StoreReader
from storage.writer import StoreWriter

FINGERPRINT = "0123abcd"


@pytest.fixture
def store(tmp_path: Path, make_spec, make_sample) -> Path:
    """Two fingerprints, three samples; the samples have both kinds of rows."""
    url = tmp_path / "store"
    with StoreWriter(str(url), make_spec()) as writer:
        writer.write(make_sample("a", 23))
        writer.write(make_sample("b", 16))
    raw = make_spec(fingerprint="ffff", encoding=dataclasses.replace(PRESETS["lossless"], codec="raw", level=0))
    with StoreWriter(str(url), raw) as writer:
        writer.write(make_sample("c", 13))
    return url


def run(*arguments: object) -> tuple[int, str]:
    """Exit code, and standard output and error together on lines of any length."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def shards(store: Path, pattern: str) -> list[Path]:
    return sorted(store.glob(f"{FINGERPRINT}/states/*/{pattern}"))


def make_old(folder: Path, hours: float = 48) -> None:
    then = time.time() - 3600 * hours
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


def test_ls_says_what_is_there(store):
    # Red when a fingerprint is missing or its line does not say target, layers, samples and tokens.
    code, output = run("ls", store)
    assert code == 0
    [first, second] = output.splitlines()
    assert first.startswith("0123abcd  tiny/target  layers 1/3/5  D=8  lossless  2 samples  39 tokens")
    assert second.startswith("ffff  tiny/target  layers 1/3/5  D=8  custom  1 samples  13 tokens")


def test_ls_names_samples(store):
    code, output = run("ls", store, "--samples", "--fingerprint", FINGERPRINT)
    assert code == 0
    [first, second] = output.splitlines()
    assert first.startswith("a  23 tokens  ")
    assert second.startswith("b  16 tokens  ")


def test_info_is_a_promise_to_scripts(store, make_sample):
    # Red when a field that a script may read goes away, or a number is not that of the files.
    code, output = run("info", store, "--json")
    assert code == 0
    [first, second] = map(json.loads, output.splitlines())
    samples = [make_sample("a", 23), make_sample("b", 16)]
    targets = sum(len(sample.target_lse) for sample in samples)
    files = [path for path in (store / FINGERPRINT).rglob("*") if path.is_file()]
    assert first == {
        "url": str(store),
        "fingerprint": FINGERPRINT,
        "format_version": 2,
        "target": "tiny/target",
        "aux_layer_ids": [1, 3, 5],
        "hidden_size": 8,
        "vocab_size": 50,
        "preset": "lossless",
        "encoding": dataclasses.asdict(PRESETS["lossless"]),
        "chunk_tokens": 4,
        "shard_tokens": 8,
        "samples": 2,
        "tokens": 39,
        "target_rows": targets,
        "exceptions": 0,
        "segments": 1,
        "ratio": first["raw_bytes"] / first["total_bytes"],
        "raw_bytes": 39 * (48 + 5) + targets * (16 + 8),
        "total_bytes": sum(path.stat().st_size for path in files),
        "bytes_by_array": {
            name: sum(path.stat().st_size for path in shards(store, f"{name}/c.*"))
            for name in ("aux_planes", "last_planes", "tokens")
        },
        "ratio_by_array": {
            "aux_planes": 39 * 48 / first["bytes_by_array"]["aux_planes"],
            "last_planes": targets * 16 / first["bytes_by_array"]["last_planes"],
        },
    }
    assert second["preset"] == "custom"


@pytest.mark.parametrize("preset", list(PRESETS))
def test_info_for_people_says_the_preset(tmp_path, make_spec, make_sample, preset):
    spec = make_spec(preset=preset)
    with StoreWriter(str(tmp_path), spec) as writer:
        writer.write(make_sample("a", 40, spec))
    code, output = run("info", tmp_path)
    assert code == 0
    assert f"preset       {preset if spec.encoding in PRESETS.values() else 'custom'}: aux " in output
    assert "tokens       40, " in output
    assert "x smaller than bfloat16" in output


def test_verify_passes_a_sound_store(store):
    # Red when a sound sample is reported, or a fingerprint or sample is left out.
    code, output = run("verify", store)
    assert code == 0
    assert "3 samples of 2 fingerprints read, 0 errors" in output
    code, output = run("verify", store, "--fingerprint", "ffff")
    assert code == 0
    assert "1 samples of 1 fingerprints read, 0 errors" in output


def test_verify_names_each_bad_sample_and_fails(store):
    # Red when verify stops at the first fault, misses one, or exits 0.
    shards(store, "aux_planes/c.*")[0].unlink()
    [shard] = store.glob("ffff/states/*/tokens/c.0.0")
    shard.write_bytes(shard.read_bytes()[:-3])
    code, output = run("verify", store)
    assert code == 1
    assert "sample a: aux_planes is damaged: states/" in output
    assert "/aux_planes/c.0.0.0.0 is missing" in output
    assert "sample c: tokens is damaged: states/" in output
    assert "sample b" not in output
    assert "3 samples of 2 fingerprints read, 2 errors" in output


def test_repair_drops_what_is_damaged_and_capture_fills_it(store, make_spec, make_sample, assert_same):
    # Red when repair leaves a damaged sample, takes a sound one, or the store refuses the sample afterwards.
    shards(store, "aux_planes/c.*")[0].unlink()
    code, output = run("verify", store, "--repair")
    assert code == 0
    assert "dropped from the index: " in output
    assert "sample a" in output
    with StoreReader(str(store), make_spec()) as reader:
        assert reader.sample_ids() == {"b"}
    assert run("verify", store)[0] == 0
    with StoreWriter(str(store), make_spec()) as writer:
        assert writer.committed() == {"b"}
        writer.write(make_sample("a", 23))
    with StoreReader(str(store), make_spec()) as reader:
        assert_same(reader.read("a"), make_sample("a", 23))
    assert run("verify", store)[0] == 0


def test_a_damaged_index_fails_all_and_hides_nothing_else(store):
    # Red when one unreadable fingerprint hides the others, or is passed over.
    [index] = (store / FINGERPRINT / "index").glob("*.jsonl")
    sound = index.read_bytes()
    index.write_bytes(sound[:40] + b"0" + sound[41:])
    for command in ("ls", "verify"):
        code, output = run(command, store)
        assert code == 1
        assert f"index file {index} is damaged at line 1" in output.replace("\n", " ")
    assert "1 samples of 2 fingerprints read, 1 errors" in output
    code, output = run("verify", store, "--repair")
    assert code == 0
    assert f"dropped from the index: {index.name} line 1" in output
    code, output = run("verify", store)
    assert (code, "2 samples of 2 fingerprints read, 0 errors" in output) == (0, True)


def test_attributes_that_cannot_be_read_are_no_sample_to_drop(store):
    (store / FINGERPRINT / "states" / "zarr.json").write_bytes(b"{}")
    code, output = run("verify", store, "--repair")
    assert code == 1
    assert "is not a store of hidden states" in output
    assert "1 samples of 2 fingerprints read" in output
    assert len(list((store / FINGERPRINT / "index").glob("*.jsonl"))) == 1


def test_gc_takes_what_no_sample_needs_once_it_is_old(store, make_spec, make_sample, assert_same):
    # Red when a committed sample loses a byte, garbage stays, or a file that is about to be committed goes.
    segment = shards(store, "zarr.json")[0].parent
    (segment / "tokens" / "c.7.0").write_bytes(b"killed")
    (segment / "tokens" / ".c.8.0.0123.partial").write_bytes(b"killed earlier")
    orphan = segment.with_name("19990101T000000Z-0123456789ab")
    (orphan / "tokens").mkdir(parents=True)
    (orphan / "zarr.json").write_bytes(b"{}")
    (orphan / "tokens" / "c.0.0").write_bytes(b"x")
    (store / FINGERPRINT / "claims").mkdir(exist_ok=True)
    (store / FINGERPRINT / "claims" / "w.json").write_bytes(b"{}")
    code, output = run("gc", store)
    assert code == 0
    assert f"{FINGERPRINT}  0 files, 0.0 MB, deleted; 5 more are younger than 24 hours" in output
    make_old(store)
    code, output = run("gc", store, "--dry-run")
    assert f"{FINGERPRINT}  5 files, 0.0 MB, would be deleted" in output
    assert (segment / "tokens" / "c.7.0").exists()
    code, output = run("gc", store)
    assert code == 0
    assert f"{FINGERPRINT}  5 files, 0.0 MB, deleted" in output
    assert not list(store.rglob("*.partial"))
    assert not [path for path in orphan.rglob("*") if path.is_file()]
    assert "0 files" in run("gc", store)[1]
    with StoreReader(str(store), make_spec()) as reader:
        assert_same(reader.read("a"), make_sample("a", 23))
    assert run("verify", store)[0] == 0


def test_gc_takes_what_repair_dropped(store):
    shards(store, "aux_planes/c.*")[0].unlink()
    run("verify", store, "--repair")
    make_old(store)
    before = len(shards(store, "*/c.*"))
    run("gc", store)
    assert 0 < len(shards(store, "*/c.*")) < before
    assert run("verify", store)[0] == 0


def test_gc_gives_up_a_fingerprint_but_not_what_is_kept(store, make_spec, make_sample, assert_same):
    # Red when a sample that a champion's history names is deleted.
    make_old(store)
    (store / "keep").mkdir()
    (store / "keep" / "champion.json").write_text(json.dumps({"fingerprint": FINGERPRINT, "sample_ids": ["b", "gone"]}))
    code, output = run("gc", store, "--drop", FINGERPRINT, "--drop", "ffff")
    assert code == 0
    assert f"{FINGERPRINT}  1 samples given up, 1 kept; " in output
    assert "ffff  1 samples given up, 0 kept; " in output
    with StoreReader(str(store), make_spec()) as reader:
        assert reader.sample_ids() == {"b"}
        assert_same(reader.read("b"), make_sample("b", 16))
    assert not list(store.glob("ffff/states/*/*/c.*"))
    (store / "keep" / "all.json").write_text(json.dumps({"fingerprint": FINGERPRINT, "sample_ids": None}))
    assert f"{FINGERPRINT}  0 samples given up, 1 kept; " in run("gc", store, "--drop", FINGERPRINT)[1]


@pytest.mark.parametrize(
    "content", ["", "{}", '{"fingerprint": "x", "sample_ids": "b"}', '{"fingerprint": 3, "sample_ids": null}']
)
def test_gc_does_nothing_when_a_keep_list_cannot_be_read(store, content):
    make_old(store)
    (store / "keep").mkdir()
    (store / "keep" / "champion.json").write_text(content)
    code, output = run("gc", store, "--drop", FINGERPRINT)
    assert code == 1
    assert "champion.json cannot be read, so nothing is deleted" in output.replace("\n", " ")
    assert "2 samples of 1 fingerprints" in run("verify", store, "--fingerprint", FINGERPRINT)[1]


def test_gc_refuses_a_fingerprint_that_is_not_there(store):
    code, output = run("gc", store, "--drop", "nope")
    assert code == 1
    assert "holds no fingerprint nope" in output


def test_convert_encodes_anew_and_goes_on_where_it_stopped(store, tmp_path, make_spec, make_sample, assert_same):
    # Red when a converted sample is not what a capture into the new encoding would have given.
    target = tmp_path / "near"
    spec = make_spec(preset="near", chunk_tokens=8)
    arguments = ("convert", store, target, "--preset", "near", "--fingerprint", FINGERPRINT, "--chunk-tokens", 8)
    code, output = run(*arguments)
    assert code == 0, output
    assert f"2 samples of {FINGERPRINT} written to {target} as near, 0 were there already" in output
    samples = [make_sample("a", 23), make_sample("b", 16)]
    statistics = calibrate(samples, spec)
    with StoreReader(str(target), spec) as reader:
        for sample in samples:
            assert_same(reader.read(sample.sample_id), round_trip(sample, spec, statistics))
    assert run("verify", target)[0] == 0
    assert "0 samples" in run(*arguments)[1]
    assert "2 were there already" in run(*arguments)[1]


def test_convert_keeps_fewer_tokens_of_a_target(tmp_path, make_spec, make_sample):
    spec = make_spec(preset="small")
    with StoreWriter(str(tmp_path / "from"), spec) as writer:
        writer.write(make_sample("a", 60, spec))
    code, output = run("convert", tmp_path / "from", tmp_path / "to", "--preset", "tiny", "--top-k", 2)
    assert code == 0, output
    with StoreReader(str(tmp_path / "from"), spec) as before, StoreReader(str(tmp_path / "to")) as after:
        more, fewer = before.read("a").top_k, after.read("a").top_k
    for row in range(len(fewer.ids)):
        likeliest = more.ids[row][more.log_probabilities[row].argsort()[::-1][:2]]
        assert set(fewer.ids[row]) == set(likeliest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--preset", "small", "--fingerprint", FINGERPRINT),
            "the source holds hidden states, and top-k",
        ),
        (("--preset", "near"), "holds 2 fingerprints (0123abcd, ffff): name one"),
        (("--preset", "near", "--fingerprint", FINGERPRINT, "--aux-step", "99"), "aux_step 99.0 must lie in"),
    ],
)
def test_convert_says_what_cannot_be(store, tmp_path, arguments, message):
    code, output = run("convert", store, tmp_path / "to", *arguments)
    assert code == 1
    assert message in output.replace("\n", " ")


def test_convert_into_itself_is_refused(store):
    code, output = run("convert", store, store, "--preset", "near", "--fingerprint", FINGERPRINT)
    assert code == 1
    assert "aux_step is None there, 0.1 here" in output.replace("\n", " ")


@pytest.mark.parametrize("command", ["ls", "info", "verify", "gc"])
def test_no_store_is_an_error(command, tmp_path):
    # Red when a mistyped URL looks like a sound store.
    code, output = run(command, tmp_path / "nowhere")
    assert code == 1
    assert "there is no store of hidden states at" in output
    code, output = run(command, "https://user:secret@host/store")
    assert code == 1
    assert "holds user info" in output
    assert "secret" not in output


def test_what_commands_find_can_be_had_as_json(store, tmp_path):
    # Red when a command's --json is not one JSON object a line, or leaves out what its words say.
    def lines(*arguments: object) -> list[dict[str, object]]:
        code, output = run(*arguments, "--json")
        assert code == 0, output
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]

    assert [one["samples"] for one in lines("ls", store)] == [2, 1]
    assert {one["sample_id"] for one in lines("ls", store, "--samples")} == {"a", "b", "c"}
    assert [(one["num_samples"], one["faults"]) for one in lines("verify", store)] == [(2, []), (1, [])]
    assert all(one["dry_run"] for one in lines("gc", store, "--dry-run"))
    converted = lines("convert", store, tmp_path / "new", "--preset", "lossless", "--fingerprint", FINGERPRINT)
    assert converted[0]["num_samples"] == 2
    shards(store, "aux_planes/c.*")[0].unlink()
    code, output = run("verify", store, "--json")
    assert code == 1
    assert json.loads(next(line for line in output.splitlines() if line.startswith("{")))["faults"]
