"""Runs whose packs are shared by two ranks: the run of one rank, from a store and from the target."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from storage.reader import StoreReader
from tasks.trainer.draft.context import Sharing
from tasks.trainer.errors import InputError
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import run_stage, stages_of
from tasks.trainer.target import Target, TopTokens
from tasks.trainer.train import checkpoint
from tasks.trainer.train.batches import Batch
from tasks.trainer.train.curves import read_heldout, read_metrics
from tasks.trainer.train.parallel import joined
from tasks.trainer.train.sources import OnlineSource, StoreSource
from tasks.trainer.train.stage import train_draft
from tests.trainer.ranks import run_as_ranks
from tests.trainer.train.test_sources import DOCUMENTS, ENCODINGS, PACKS, fill, spec_of

Values = Callable[..., dict[str, Any]]
K = 3


def shared_out(whole: Batch, shares: list[Batch]) -> None:
    """Red where the shares are not the whole batch, each rank's rows and the soft targets that they read."""
    places = {int(row): place for place, row in enumerate(whole.target_rows)}
    for batch in shares:
        assert batch.share is not None
        assert torch.equal(batch.token_ids, whole.token_ids)
        assert torch.equal(batch.loss_mask, whole.loss_mask)
        assert batch.document_lengths == whole.document_lengths
        assert torch.equal(batch.aux_hidden, whole.aux_hidden[batch.share.own_rows])
        at = torch.tensor([places[int(row)] for row in batch.target_rows], dtype=torch.int64)
        for name in ("target_argmax", "target_lse", "last_hidden"):
            if getattr(whole, name) is not None:
                assert torch.equal(getattr(batch, name), getattr(whole, name)[at]), name
        if whole.top_k is not None:
            assert isinstance(batch.top_k, TopTokens)
            assert torch.equal(batch.top_k.ids, whole.top_k.ids[at])
            assert torch.equal(batch.top_k.log_probabilities, whole.top_k.log_probabilities[at])
    owned = torch.cat([batch.share.own_rows for batch in shares if batch.share is not None])
    assert torch.equal(owned.sort().values, torch.arange(len(whole.token_ids)))


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    return Target.load(str(target_folder), dtype="bfloat16")


def test_ranks_read_their_rows_of_what_the_target_gives(target: Target) -> None:
    """Red when a rank trains on another row's states, or runs the target on documents of which it has no row."""
    seen: list[int] = []
    target.model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].numel()))
    shares = [list(OnlineSource(target, sharing=Sharing(rank, 2, K)).batches(PACKS)) for rank in range(2)]
    assert sum(seen) < 2 * sum(len(sample.token_ids) for sample in DOCUMENTS)
    for number, whole in enumerate(OnlineSource(target).batches(PACKS)):
        shared_out(whole, [of_rank[number] for of_rank in shares])


@pytest.mark.parametrize("name", ENCODINGS)
def test_ranks_read_their_rows_of_the_store(name: str, target: Target, tmp_path: Path) -> None:
    """Red when a window of a stored sample, its exceptions or its soft targets, are placed as if it were whole."""
    url, spec = str(tmp_path / "store"), spec_of(target, ENCODINGS[name])
    fill(url, target, ENCODINGS[name], DOCUMENTS)
    with StoreReader(url, spec) as reader:
        shares = [list(StoreSource(reader, sharing=Sharing(rank, 3, K)).batches(PACKS)) for rank in range(3)]
        for number, whole in enumerate(StoreSource(reader).batches(PACKS)):
            shared_out(whole, [of_rank[number] for of_rank in shares])


def test_a_rank_fetches_the_chunks_of_its_rows(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when each rank reads whole samples: the store would be read as often as there are ranks."""
    url, spec = str(tmp_path / "store"), spec_of(target, ENCODINGS["lossless"])
    fill(url, target, ENCODINGS["lossless"], DOCUMENTS)
    asked: list[int] = []
    with StoreReader(url, spec) as reader:
        original = reader.read_window

        def watching(sample_id: str, start: int = 0, stop: int | None = None) -> Any:
            asked.append((len(DOCUMENTS[1].token_ids) if stop is None else stop) - start)
            return original(sample_id, start, stop)

        monkeypatch.setattr(reader, "read_window", watching)
        list(StoreSource(reader, sharing=Sharing(0, 2, K)).batches([[DOCUMENTS[1]]]))
    assert 45 <= sum(asked) <= 45 + 8 + 2 * (K + 1), "half of 90 tokens, and what lies past the ends"


def train_all(values: list[dict[str, Any]]) -> None:
    """A rank's part of prepared runs."""
    with joined(device="cpu", context_size=2, patience_s=60) as layout:
        for of_run in values:
            config = load_config(of_run)
            train_draft(config, RunDir.create(config), silent, layout=layout)


def prepared_run(values: dict[str, Any]) -> RunDir:
    config = load_config(values)
    run = RunDir.create(config)
    for stage in stages_of(config):
        if stage == "train":
            break
        run_stage(stage, run, silent)
    return run


def test_a_run_of_two_ranks_that_share_packs_is_the_run_of_one(recipe_values: Values, tmp_path: Path) -> None:
    """Red when sums of the ranks are doubled or lost, the weights of rows count a pack once a rank, gradients are
    averaged, ranks look at held-out samples by halves, or a checkpoint holds one rank's view."""
    train = {"steps": 5, "grad_accumulation": 2, "evaluate_every": 5, "evaluate_tokens": 200, "checkpoint_every": 5}
    modes = {
        "online": {"mode": "online"},
        "offline": {"mode": "offline", "store_url": str(tmp_path / "store"), "preset": "lossless"},
    }
    two = {"nproc": 2, "context_parallel": 2}
    shared = []
    for mode, states in modes.items():
        run_stage("train", prepared_run(recipe_values(f"{mode}-one", train=train, hidden_states=states)), silent)
        for sharding in ("ddp", "fsdp"):
            more = {**train, **two, "sharding": sharding}
            shared.append(recipe_values(f"{mode}-{sharding}", train=more, hidden_states=states))
    # The target's weights are shared as well: sums come in another order, and a few states differ in their last bit.
    run_stage("train", prepared_run(recipe_values("tensor-one", train=train, target={"dtype": "float32"})), silent)
    tensor = {"dtype": "float32", "parallel": "tensor"}
    shared.append(recipe_values("tensor", train={**train, **two}, target=tensor))
    for values in shared:
        prepared_run(values)
    run_as_ranks(train_all, shared)
    for mode, sharding in itertools.product(modes, ("ddp", "fsdp")):
        assert_same(*(RunDir.open(str(tmp_path / f"{mode}-{name}")) for name in (sharding, "one")))
    lines, of_one = (read_metrics(RunDir.open(str(tmp_path / name)).metrics) for name in ("tensor", "tensor-one"))
    assert [line["rows"] for line in lines] == [line["rows"] for line in of_one]
    np.testing.assert_allclose([line["loss"] for line in lines], [line["loss"] for line in of_one], rtol=1e-3)


def assert_same(found: RunDir, expected: RunDir) -> None:
    """Metrics of training and of held-out samples, the place in the data, and the masters, to rounding."""
    lines, of_one = read_metrics(found.metrics), read_metrics(expected.metrics)
    assert [line["step"] for line in lines] == [line["step"] for line in of_one]
    for line, one in zip(lines, of_one, strict=True):
        assert line["tokens"] == one["tokens"]
        assert line["rows"] == one["rows"]
        # Adam divides by the size of a gradient, so that float32's rounding of a small one is the rounding of an
        # update; it reaches the loss to first order, and grows from step to step.
        for key in ("loss", "grad_norm", "step_losses", "alpha"):
            np.testing.assert_allclose(line[key], one[key], rtol=1e-4, err_msg=f"{found.url}, {key}")
    looks, looks_of_one = read_heldout(found.metrics), read_heldout(expected.metrics)
    assert looks.keys() == looks_of_one.keys() == {5}
    assert looks[5]["rows"] == looks_of_one[5]["rows"]
    np.testing.assert_allclose(looks[5]["loss"], looks_of_one[5]["loss"], rtol=1e-4)
    saved, saved_of_one = checkpoint.load_latest(found.checkpoints), checkpoint.load_latest(expected.checkpoints)
    assert saved is not None
    assert saved_of_one is not None
    assert saved.position == saved_of_one.position
    for name, tensor in saved_of_one.draft.items():
        torch.testing.assert_close(saved.draft[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_one_rank_does_not_share_with_itself(recipe_values: Values) -> None:
    """Red when context_parallel is ignored where there is one rank: the user would believe in twice the context."""
    run = prepared_run(recipe_values(train={"context_parallel": 2}))
    with pytest.raises(InputError, match=r"context_parallel=2 takes .* this run has 1: set train.nproc=2"):
        run_stage("train", run, silent)
