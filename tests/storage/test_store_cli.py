"""`ls` and `verify` as a user calls them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from storage.cli import app
from storage.writer import StoreWriter


@pytest.fixture
def store(tmp_path: Path, make_spec, make_sample) -> Path:
    """Two fingerprints, three samples."""
    with StoreWriter(str(tmp_path), make_spec()) as writer:
        writer.write(make_sample("a", 13))
        writer.write(make_sample("b", 6))
    with StoreWriter(str(tmp_path), make_spec(fingerprint="ffff", codec="raw")) as writer:
        writer.write(make_sample("c", 3))
    return tmp_path


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_ls_says_what_is_there(store):
    # Red when a fingerprint is missing or its line does not say target, layers, samples and tokens.
    code, output = run("ls", store)
    assert code == 0
    [first, second] = output.splitlines()
    assert first.startswith("0123abcd  tiny/target  layers 1/3/5  D=8  lossless  2 samples  19 tokens")
    assert second.startswith("ffff  tiny/target  layers 1/3/5  D=8  raw  1 samples  3 tokens")


def test_verify_passes_a_sound_store(store):
    # Red when a sound sample is reported, or a fingerprint or sample is left out.
    code, output = run("verify", store)
    assert code == 0
    assert "3 samples of 2 fingerprints read, 0 errors" in output


def test_verify_names_each_bad_sample_and_fails(store):
    # Red when verify stops at the first fault, misses one, or exits 0.
    [shard] = store.glob("0123abcd/states/*/token_ids/c.1")
    shard.unlink()
    [shard] = store.glob("ffff/states/*/last_hidden/c.0.0")
    shard.write_bytes(shard.read_bytes()[:-3])
    code, output = run("verify", store)
    assert code == 1
    assert "sample a: token_ids is damaged" in output
    assert "sample c: last_hidden is damaged" in output
    assert "sample b" not in output
    assert "3 samples of 2 fingerprints read, 2 errors" in output


def test_a_damaged_index_fails_both_and_hides_nothing_else(store):
    # Red when one unreadable fingerprint hides the others, or is passed over.
    [index] = store.glob("0123abcd/index/*.jsonl")
    index.write_bytes(b"{}\n")
    for command in ("ls", "verify"):
        code, output = run(command, store)
        assert code == 1
        assert f"index file {index} is damaged at line 1" in output.replace("\n", " ")
    assert "1 samples of 2 fingerprints read, 1 errors" in output


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_no_store_is_an_error(command, tmp_path):
    # Red when a mistyped URL looks like a sound store.
    code, output = run(command, tmp_path / "nowhere")
    assert code == 1
    assert "there is no store of hidden states at" in output
    code, output = run(command, "s3://bucket/store")
    assert code == 1
    assert "scheme s3:// are not served" in output
