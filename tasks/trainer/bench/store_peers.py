"""How others keep hidden states: a file a sample, whole bfloat16 tensors, raw or under gzip."""

from __future__ import annotations

import gzip
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from storage.bench.measure import Captured, Figure

_RANDOM_READS = 20


def peer_figures(captured: Sequence[Captured], folder: Path, *, rounds: int = 1) -> Iterator[Figure]:
    """Ratio and speeds of each peer, with the same content: last hidden states on target rows only.

    The metrics are those of storage.bench.measure. Files lie in the system's cache, as the store's do.
    """
    megabytes = sum(one.state_bytes for one in captured) / 1e6
    raw = sum(sum(tensor.nbytes for tensor in tensors_of(one).values()) for one in captured)
    rng = np.random.default_rng(0)
    for name, (suffix, save, load) in _PEERS.items():
        paths = [folder / f"{one.sample.sample_id}{suffix}" for one in captured]
        write, read = [], []
        for _ in range(rounds):
            started = time.perf_counter()
            for one, path in zip(captured, paths, strict=True):
                save(tensors_of(one), path)
            write.append(time.perf_counter() - started)
            started = time.perf_counter()
            for path in paths:
                load(path)
            read.append(time.perf_counter() - started)
        yield name, "write MB/s", megabytes / statistics.median(write)
        yield name, "read MB/s", megabytes / statistics.median(read)
        yield name, "ratio", raw / sum(path.stat().st_size for path in paths)
        latencies = []
        for at in rng.integers(0, len(paths), _RANDOM_READS):
            started = time.perf_counter()
            load(paths[at])
            latencies.append(time.perf_counter() - started)
        yield name, "latency ms", 1e3 * statistics.median(latencies)
        yield name, "gpu share", 1.0


def tensors_of(one: Captured) -> dict[str, Tensor]:
    """The sample as such a file holds it."""
    sample = one.sample
    assert sample.last_hidden is not None
    return {
        "input_ids": torch.from_numpy(sample.token_ids),
        "loss_mask": torch.from_numpy(sample.loss_mask),
        "aux_hidden": torch.from_numpy(sample.aux_hidden).view(torch.bfloat16),
        "last_hidden": torch.from_numpy(sample.last_hidden).view(torch.bfloat16),
        "target_argmax": torch.from_numpy(sample.target_argmax),
        "target_lse": torch.from_numpy(sample.target_lse),
    }


def _save_gzip(tensors: dict[str, Tensor], path: Path) -> None:
    with gzip.open(path, "wb") as file:
        torch.save(tensors, cast(IO[bytes], file))


def _load_gzip(path: Path) -> dict[str, Tensor]:
    with gzip.open(path, "rb") as file:
        loaded: dict[str, Tensor] = torch.load(cast(IO[bytes], file), weights_only=True)
    return loaded


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    # The file is mapped; only a copy reads it.
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


_PEERS: dict[str, tuple[str, Callable[[dict[str, Tensor], Path], None], Callable[[Path], dict[str, Tensor]]]] = {
    "safetensors": (".safetensors", lambda tensors, path: save_file(tensors, path), _load_safetensors),
    "torch.save + gzip": (".pt.gz", _save_gzip, _load_gzip),
}
