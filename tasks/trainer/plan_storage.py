"""Bytes that a store will take, and how fast it is read and written: predicted, and measured where it will lie.

What a value takes follows from its step: each doubling saves about a bit. The anchors are measured on real states
(storage/bench/results.csv, the mean of two kinds of text; a test holds them to it). A store of the same encoding that
already has samples of this target knows better, and is asked first (plan.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from storage.errors import StoreError
from storage.location import locate
from storage.presets import Encoding

# Bits a value by step, in standard deviations of a channel; exceptions, checksums and indexes included.
AUX_BITS = {0.1: 5.356, 0.3: 3.571, 0.5: 2.855, 0.8: 2.199}
LAST_BITS = {0.05: 6.668, 0.1: 5.459}
LOSSLESS_BITS = 10.64
# Bytes of a soft target's entry by the number of entries.
TOP_K_BYTES: dict[float, float] = {64: 1.816, 256: 1.623}
# Ids, mask, argmax and log-sum-exp, compressed: a token; indexes and padding: a sample.
TOKEN_BYTES, SAMPLE_BYTES = 5.2, 700
# What is read of a token: bfloat16 bytes a second and core, decoded to codes from samples of 16K tokens.
_DECODED = {"lossless": 0.28e9, "steps": 1.1e9, "topk": 0.35e9}
# bfloat16 bytes a second and core that the writer encodes.
_ENCODED = {"lossless": 0.10e9, "steps": 0.07e9, "topk": 0.04e9}
_PROBE_BYTES, _PROBES = 16 * 2**20, 4


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What the place of a store gives; measured with objects of 16 MiB."""

    read: float
    """Bytes a second."""
    write: float
    """Bytes a second, until they are durable."""
    free: int | None
    """Bytes free on a local disk; None at a URL."""


def stored_bytes(encoding: Encoding, *, hidden_size: int, tokens: int, targets: int, samples: int) -> int:
    """Bytes that samples take in a store of this encoding. targets: their target rows."""
    if encoding.last == "topk":
        assert encoding.top_k is not None
        soft_target = encoding.top_k * _between(TOP_K_BYTES, float(encoding.top_k))
    else:
        soft_target = hidden_size * _bits(encoding, encoding.last_step, LAST_BITS) / 8
    aux = 3 * hidden_size * _bits(encoding, encoding.aux_step, AUX_BITS) / 8
    return round(tokens * (aux + TOKEN_BYTES) + targets * soft_target + samples * SAMPLE_BYTES)


def _bits(encoding: Encoding, step: float | None, anchors: dict[float, float]) -> float:
    if encoding.codec == "raw":
        # Codes in whole bytes, or two in one where 15 levels are enough (storage.forms).
        return 16.0 if step is None else 8.0
    return LOSSLESS_BITS if step is None else max(1.0, _between(anchors, step))


def _between(anchors: dict[float, float], at: float) -> float:
    """Linear in log(at) between the anchors, and on from the outermost two."""
    places = sorted(anchors)
    upper = next((index for index, place in enumerate(places[1:], 1) if at <= place), len(places) - 1)
    low, high = places[upper - 1], places[upper]
    share = math.log(at / low) / math.log(high / low)
    return anchors[low] + share * (anchors[high] - anchors[low])


def reading_seconds(encoding: Encoding, place: Bandwidth, *, stored: float, raw: float, cores: int) -> float:
    """Seconds to have samples of so many stored bytes (raw: as bfloat16) read and decoded; the two overlap."""
    return max(stored / place.read, raw / (_DECODED[_kind(encoding)] * max(1, cores)))


def writing_seconds(encoding: Encoding, place: Bandwidth, *, stored: float, raw: float, cores: int) -> float:
    """The same for encoding and writing them."""
    return max(stored / place.write, raw / (_ENCODED[_kind(encoding)] * max(1, cores)))


def codes_bytes(encoding: Encoding, *, hidden_size: int, tokens: int, targets: int) -> int:
    """Bytes of a pack's states on their way to the device, which stay there until the next pack is in use."""
    aux = tokens * 3 * hidden_size * (2 if encoding.aux_step is None else 1)
    if encoding.last == "topk":
        assert encoding.top_k is not None
        return aux + targets * 8 * encoding.top_k
    return aux + targets * hidden_size * (2 if encoding.last_step is None else 1)


def _kind(encoding: Encoding) -> str:
    if encoding.last == "topk":
        return "topk"
    return "lossless" if encoding.aux_step is None else "steps"


def measure_bandwidth(url: str) -> Bandwidth:
    """Write and read a few objects where the store will lie, and delete them.

    A local disk is read past its cache, where the system lets us. Raises StoreError when the place cannot be written.
    """
    place, free = locate(url), None
    if place.is_local:
        folder = _existing(Path(place.path))
        place, free = locate(str(folder)), shutil.disk_usage(folder).free
        if free < 2 * _PROBES * _PROBE_BYTES:
            raise StoreError(f"the disk of store {url!r} has only {free / 1e9:.2f} GB free; give another store_url")
    content = os.urandom(_PROBE_BYTES)
    names = [f".probe-{secrets.token_hex(6)}" for _ in range(_PROBES)]
    try:
        started = time.perf_counter()
        for name in names:
            place.write_bytes(name, content)
        written = time.perf_counter() - started
        if place.is_local:
            for name in names:
                _forget(Path(place.path) / name)
        started = time.perf_counter()
        for name in names:
            place.read_bytes(name)
        read = time.perf_counter() - started
    except OSError as error:
        raise StoreError(f"store {url!r} cannot be written: {error.strerror or error}") from None
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                place.delete(name)
    return Bandwidth(read=_PROBES * _PROBE_BYTES / read, write=_PROBES * _PROBE_BYTES / written, free=free)


def _existing(path: Path) -> Path:
    """The nearest folder that is there: planning makes none."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def _forget(path: Path) -> None:
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
