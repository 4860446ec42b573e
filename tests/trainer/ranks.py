"""Processes that are ranks, without torchrun: what is slow to import is imported once for all of a test session's."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import torch


def run_as_ranks(function: Callable[..., None], *arguments: Any, num_ranks: int = 2) -> None:
    """function(*arguments) in each of num_ranks processes, in the environment that torchrun would give them. function:
    of a module, so that they find it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tasks.trainer.train.stage"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        context.Process(target=_run, args=(rank, num_ranks, port, function, arguments), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=180)
    assert [process.exitcode for process in ranks] == [0] * num_ranks, "see what the ranks said"


def _run(rank: int, num_ranks: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    function(*arguments)
