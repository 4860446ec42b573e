"""How a chunk of an array becomes bytes: "zstd", "blosc" or "raw".

* zstd: for bytes whose values are uneven: codes, pairs, planes (storage.forms). Its Huffman stage comes within 1-2% of
  their entropy and decodes at 3-5 GB/s a core. Level 1: higher ones search for repetitions that noise does not have.
* blosc: zstd behind a byte shuffle, for integers, and for bfloat16 in one array that any program reads as it is: sign
  and mantissa are noise, the exponent byte is not. Blosc's default block size cuts a chunk into pieces too small to
  profit (1.28 x smaller than raw on real states); `blocksize=1<<20` gives 1.43 to 1.47 x.
* raw: chunks as they are, for debugging and for disks faster than a core. A chunk is stored whole, so that a sample of
  150 tokens in chunks of 512 costs 512 rows.

All are codecs of the Zarr specification. (pcodec, which is not, gained less than storage.forms does, at a third of the
speed; and what pads a short sample's chunk costs it a bit a value.)

CRC-32C stands outermost on every chunk, under every codec: zarr reads a flipped bit back as wrong data, without an
error, under zstd and blosc as well as under no compression. 4 bytes a chunk; in hardware about 9 GB/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import numcodecs
import numpy as np
import numpy.typing as npt

CodecName = Literal["zstd", "blosc", "raw"]
CODEC_NAMES: tuple[CodecName, ...] = get_args(CodecName)
LEVELS: Mapping[CodecName, tuple[int, int]] = MappingProxyType({"zstd": (1, 19), "blosc": (1, 9), "raw": (0, 0)})

# Measured on real states: one block a chunk, as a chunk of 512 tokens is under 1 MiB up to D = 1,024.
_BLOSC_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ChunkCodec:
    """Turns the elements of one chunk into bytes and back, without the CRC-32C that ends every stored chunk."""

    name: CodecName
    """Which one."""
    level: int
    """Its level; 0 for "raw"."""

    def encode(self, chunk: npt.NDArray[Any]) -> bytes:
        """The bytes of a C-contiguous chunk of any shape. Thread-safe; the GIL is released while it compresses."""
        assert chunk.flags.c_contiguous
        if self.name == "raw":
            return chunk.tobytes()
        return bytes(self._numcodec(chunk.dtype.itemsize).encode(chunk.reshape(-1)))

    def decode(self, data: bytes | memoryview, out: npt.NDArray[Any]) -> None:
        """Write a chunk's elements into C-contiguous `out`, of the chunk's whole size, without a copy between.

        ValueError or RuntimeError if the bytes are no such chunk. Thread-safe; the GIL is released.
        """
        assert out.flags.c_contiguous
        assert out.flags.writeable
        if self.name == "raw":
            if len(data) != out.nbytes:
                raise ValueError(f"a chunk of {len(data)} bytes where {out.nbytes} are due")
            out.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, dtype=np.uint8)
            return
        self._numcodec(out.dtype.itemsize).decode(data, out=out.reshape(-1))

    def zarr_serializer(self) -> Any:
        """Zarr's array-to-bytes codec for it."""
        # Loaded only here and below: the run's form needs the names of presets and codecs, and nothing of zarr.
        from zarr.codecs import BytesCodec

        return BytesCodec(endian="little")

    def zarr_compressors(self, *, itemsize: int) -> tuple[Any, ...]:
        """Zarr's bytes-to-bytes codecs of each chunk inside a shard, in the order in which they encode."""
        from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

        if self.name == "zstd":
            return (ZstdCodec(level=self.level), Crc32cCodec())
        if self.name == "blosc":
            blosc = BloscCodec(
                cname="zstd", clevel=self.level, shuffle="shuffle", typesize=itemsize, blocksize=_BLOSC_BLOCK_BYTES
            )
            return (blosc, Crc32cCodec())
        return (Crc32cCodec(),)

    def _numcodec(self, itemsize: int) -> Any:
        if self.name == "zstd":
            return numcodecs.Zstd(level=self.level)
        return numcodecs.Blosc(
            cname="zstd",
            clevel=self.level,
            shuffle=numcodecs.Blosc.SHUFFLE,
            blocksize=_BLOSC_BLOCK_BYTES,
            typesize=itemsize,
        )
