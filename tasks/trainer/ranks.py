"""Stages over several ranks, through torchrun's own launcher.

    stages.main            decides how many ranks; one needs nothing of this
      └ launch             torchrun in this process: starts a process a rank, ends all when one fails
          ├ worker rank 0  run_stage: holds the lease, writes what the run leaves, speaks JSON lines
          └ worker rank n  the same stage, writes nothing

A rank that fails leaves its error in torchrun's error file; the launcher tells the cause, which is not that another
rank was lost. Each rank sees one GPU only, so that "cuda" means
its own in every thread. The price of the launcher is one more process, and its import of torch.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from storage.errors import StoreError
from tasks.trainer.config import RunConfig, Train
from tasks.trainer.errors import InputError
from tasks.trainer.progress import JsonLines, emit, silent
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import EXIT_INPUT, STAGES, follow_parent, run_stage, speak_json
from tasks.trainer.stop import EXIT_INTERRUPTED, GRACE_SECONDS, interrupted, stop

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

logger = logging.getLogger(__name__)

RANKED = ("capture", "train")
"""The stages that run over ranks."""


@dataclass(frozen=True, slots=True)
class Machines:
    """How this machine finds the others."""

    nnodes: int
    node_rank: int
    address: str
    """HOST:PORT of machine 0."""


def count_ranks(stage: str, config: RunConfig, device: str) -> int:
    """Ranks of this machine for a stage. Raises InputError for more than it has GPUs."""
    settings = config.train
    if stage not in RANKED:
        return 1
    num_gpus = _num_gpus() if device == "cuda" else 0
    if settings.nproc != "auto":
        if device == "cuda" and settings.nproc > num_gpus:
            raise InputError(f"train.nproc={settings.nproc}, but this machine shows {num_gpus} GPUs; use auto or fewer")
        return settings.nproc
    if device != "cuda":
        return 1
    if stage == "capture":
        return num_gpus
    # Every data rank needs a pack in each step.
    with_packs = settings.grad_accumulation * settings.context_parallel // settings.nnodes
    chosen = max(1, min(num_gpus, with_packs) // settings.context_parallel * settings.context_parallel)
    if chosen < num_gpus:
        logger.info(
            "train.nproc=auto: %d of %d GPUs, for train.grad_accumulation=%d packs a step",
            chosen, num_gpus, settings.grad_accumulation,
        )  # fmt: skip
    return chosen


def check_ranks(settings: Train, num_ranks: int) -> None:
    """num_ranks: of all machines. Raises InputError when one would have nothing to do, or they cannot share packs as
    they should."""
    if num_ranks % settings.context_parallel:
        raise InputError(
            f"train.context_parallel={settings.context_parallel} takes as many ranks, or a multiple, and this run has "
            f"{num_ranks}: set train.nproc={settings.context_parallel}, on as many GPUs"
        )
    num_groups = num_ranks // settings.context_parallel
    if settings.grad_accumulation < num_groups:
        raise InputError(
            f"{num_groups} ranks share train.grad_accumulation={settings.grad_accumulation} packs of an "
            "optimizer step, so some would have none: set train.nproc to fewer, or "
            f"train.grad_accumulation={num_groups} or more in a new run (it changes what is trained)"
        )


def _num_gpus() -> int:
    import torch

    return int(torch.cuda.device_count())


def find_machines(nnodes: int, environment: Mapping[str, str]) -> Machines | None:
    """The rendezvous of several machines from torchrun's variables, None for one. Raises InputError when they lack."""
    if nnodes == 1:
        return None
    names = ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise InputError(
            f"train.nnodes={nnodes} needs {', '.join(missing)} in the environment of each machine (torchrun's own "
            "variables: its number from 0, and where machine 0 listens)"
        )
    rank, address, port = (environment[name] for name in names)
    return Machines(nnodes, int(rank), f"{address}:{port}")


def launch(stage: str, run_dir: str, *, nproc: int, machines: Machines | None) -> int:
    """Run a stage on nproc ranks of this machine; returns the exit code of `stages`. Emits the error, if any."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if machines is None:
        # Alone, ranks talk over the loop-back device; torchrun's store asks for a free port.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        place: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
    else:
        configs = {"rank": machines.node_rank, "timeout": 900}
        place = {"rdzv_backend": "static", "rdzv_endpoint": machines.address, "rdzv_configs": configs}
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    # A rank that does not heed SIGTERM is killed when its grace is over. (Older torch knows no such thing: 30 s.)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(int(GRACE_SECONDS + 1)))
    nnodes = machines.nnodes if machines else 1
    config = LaunchConfig(
        min_nodes=nnodes, max_nodes=nnodes, nproc_per_node=nproc, run_id="eyas", max_restarts=0, monitor_interval=0.1,
        **place,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "tasks.trainer.ranks", stage, run_dir)
    except ChildFailedError as error:
        code, message = explain(error)
        if message:
            emit({"event": "error", "message": message})
        return code
    except SignalException:
        return EXIT_INTERRUPTED
    return 0


def explain(error: ChildFailedError) -> tuple[int, str]:
    """The exit code of a failed launch, and what its cause was, in one line."""
    rank, cause = min(error.failures.items(), key=lambda failure: (_remoteness(failure[1]), failure[1].timestamp))
    text = _text(cause)
    if cause.exitcode == EXIT_INTERRUPTED:
        return EXIT_INTERRUPTED, ""  # rank 0 has said what is saved
    if cause.exitcode == EXIT_INPUT:
        return EXIT_INPUT, text.partition(": ")[2]
    if cause.exitcode < 0:
        return 1, f"rank {rank} was killed by {cause.signal_name()} (kill -9, or the system ran out of memory)"
    return 1, f"rank {rank} failed: {text or f'exit code {cause.exitcode}'}"


def _text(failure: ProcessFailure) -> str:
    """What the rank wrote, without its call stack."""
    message = failure.message
    return str(message["message"] if isinstance(message, Mapping) else message).strip() if failure.exitcode > 0 else ""


def _remoteness(failure: ProcessFailure) -> int:
    """How far a rank's end is from the cause: its own error, a hung rank seen by another, a signal, another's end."""
    text = _text(failure)
    if failure.exitcode < 0:
        return 2
    if text.startswith("RankHung"):
        return 1
    # What a collective says when another rank is gone: gloo's, and NCCL's error class.
    lost = text.startswith(("RankLost", "DistBackendError", "DistNetworkError")) or "closed by peer" in text
    return 3 if lost else 0


def work(stage: str, run_dir: str) -> dict[str, Any] | None:
    """One rank's part; returns the receipt on the first one. For a process that torchrun started."""
    run = RunDir.open(run_dir)
    config, prepared = run.config(), run.receipt("prepare")
    assert prepared is not None, "prepare comes first"
    device: str = prepared["device"]
    if device == "cuda":
        see_own_gpu()
    from tasks.trainer.train.parallel import START_PATIENCE, joined, meet

    settings = config.train
    context_size = settings.context_parallel if stage == "train" else 1
    with joined(device=device, context_size=context_size, patience_s=settings.rank_timeout) as layout:
        if layout.is_first:
            return run_stage(stage, run, JsonLines(stage), layout=layout)
        meet(layout, "the run's lease", patience=START_PATIENCE)
        STAGES[stage](config, replace(run, mirror=None), silent, layout)
    return None


def see_own_gpu() -> None:
    """Hide the other ranks' GPUs; to be called before CUDA is used."""
    local_rank = int(os.environ["LOCAL_RANK"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local_rank] if visible else str(local_rank)


def main() -> int:
    """A rank's entry: speaks JSON lines like `stages` where it is the first, leaves errors in torchrun's file."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    stage, run_dir = sys.argv[1:]
    rank = int(os.environ["RANK"])
    errors = get_error_handler()
    follow_parent()
    speak_json("" if rank == 0 else f"rank {rank}: ", logging.INFO if rank == 0 else logging.WARNING)
    try:
        with stop.installed(interrupted(f"stage {stage}")):
            receipt = work(stage, run_dir)
    except (InputError, StoreError) as error:
        errors.record_exception(error)
        return EXIT_INPUT
    except InterruptedError as error:
        if rank == 0:
            emit({"event": "error", "message": str(error)})
        return EXIT_INTERRUPTED
    except BaseException as error:
        errors.record_exception(error)
        raise
    if rank == 0:
        emit({"event": "receipt", "receipt": receipt})
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    finally:
        if code:
            # Not through the interpreter's end: a thread that reads ahead, or a collective that nobody else joins any
            # more, would be waited for there.
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
