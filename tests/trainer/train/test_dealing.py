"""Who takes what: packs among ranks, ranks among groups and machines, decided on the host before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tasks.trainer.config import Train
from tasks.trainer.errors import InputError
from tasks.trainer.ranks import check_ranks, count_ranks, find_machines
from tasks.trainer.recipe import load_config
from tasks.trainer.train.packing import deal_packs
from tasks.trainer.train.parallel import split_ranks

Values = Callable[..., dict[str, Any]]


def test_packs_are_dealt_by_cost() -> None:
    """Red when a long document counts as its tokens only, a pack is lost, or a rank gets none."""
    lengths = np.array([60_000, *[1000] * 60, 30_000, 30_000], dtype=np.int64)
    packs = [[0], list(range(1, 61)), [61, 62]]
    # 60K tokens each: one document costs 120K, two halves 90K, sixty small ones 61K.
    assert deal_packs(packs, lengths, num_ranks=2) == [[0], [1, 2]]
    generator = np.random.default_rng(0)
    for num_ranks in (1, 3, 8):
        lengths = generator.integers(1, 4096, 64)
        packs = [list(range(first, first + 4)) for first in range(0, 64, 4)]
        dealt = deal_packs(packs, lengths, num_ranks=num_ranks)
        assert sorted(number for numbers in dealt for number in numbers) == list(range(16))
        assert all(dealt)


def test_ranks_without_a_pack_are_refused() -> None:
    """Red when a run would start with idle ranks."""
    check_ranks(Train(grad_accumulation=2), 2)
    check_ranks(Train(grad_accumulation=2, context_parallel=2), 4)
    with pytest.raises(InputError, match=r"3 ranks share train.grad_accumulation=2 .* set train.nproc to fewer"):
        check_ranks(Train(grad_accumulation=2), 3)


def test_context_groups_are_neighbours() -> None:
    """Red when the ranks of a group are not one after another, or ranks are left over."""
    assert [split_ranks(6, rank, 2) for rank in range(6)] == [
        (0, 3, 0), (0, 3, 1), (1, 3, 0), (1, 3, 1), (2, 3, 0), (2, 3, 1),
    ]  # fmt: skip
    with pytest.raises(InputError, match="context_parallel=4 does not divide the 6 ranks"):
        split_ranks(6, 0, 4)


def test_the_number_of_ranks_is_chosen(monkeypatch: pytest.MonkeyPatch, recipe_values: Values) -> None:
    """Red when auto starts ranks without packs, capture is held back by packs, or missing GPUs are found late."""
    monkeypatch.setattr("tasks.trainer.ranks._num_gpus", lambda: 8)

    def chosen(stage: str, device: str, **train: Any) -> int:
        return count_ranks(stage, load_config(recipe_values(train=train)), device)

    assert chosen("train", "cuda", grad_accumulation=3) == 3
    assert chosen("train", "cuda", grad_accumulation=16) == 8
    assert chosen("train", "cuda", grad_accumulation=3, context_parallel=2) == 6
    assert chosen("train", "cuda", grad_accumulation=8, nnodes=2) == 4
    assert chosen("capture", "cuda") == 8
    assert chosen("evaluate", "cuda", grad_accumulation=8) == 1
    assert chosen("train", "cpu", grad_accumulation=8) == 1
    assert chosen("train", "cpu", grad_accumulation=8, nproc=2) == 2
    with pytest.raises(InputError, match="nproc=9, but this machine shows 8 GPUs"):
        chosen("train", "cuda", grad_accumulation=9, nproc=9)


def test_machines_need_a_rendezvous() -> None:
    """Red when one of two machines would train alone."""
    assert find_machines(1, {}) is None
    given = {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "host", "PET_MASTER_PORT": "29500"}
    machines = find_machines(2, given)
    assert machines is not None
    assert (machines.node_rank, machines.address) == (1, "host:29500")
    with pytest.raises(InputError, match="nnodes=2 needs PET_MASTER_PORT in the environment"):
        find_machines(2, {**given, "PET_MASTER_PORT": ""})
