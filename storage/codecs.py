"""How a store's arrays become bytes: codec "lossless" or "raw".

"lossless" is blosc zstd-1 with byte shuffle: bf16 sign and mantissa bits are noise, the exponent byte is not, so the
shuffle is what pays. Blosc's default block size splits a chunk into pieces too small to profit (1.28 x smaller than raw
on real states); `blocksize=1<<20` gives 1.46 x and decodes three times as fast. Higher zstd levels gain nothing.
"raw" stores the chunks as they are: for debugging, and for disks faster than a core. A chunk is stored whole, so a
sample of 150 tokens in chunks of 512 costs 512 rows under "raw", while "lossless" squeezes the rest to almost nothing.

Both put CRC-32C outermost on every chunk: zarr reads a flipped bit back as wrong data, without an error, under blosc
as well as under no compression. It costs 4 bytes a chunk and, in hardware, about 9 GB/s.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from zarr.codecs import BloscCodec, Crc32cCodec

CodecName = Literal["lossless", "raw"]
CODEC_NAMES: tuple[CodecName, ...] = get_args(CodecName)

# Measured on real states: one block a chunk, as a chunk of 512 tokens is under 1 MiB up to D = 1,024.
_BLOSC_BLOCK_BYTES = 1 << 20


def chunk_compressors(codec: CodecName, *, itemsize: int) -> tuple[Any, ...]:
    """Bytes-to-bytes codecs of each chunk inside a shard, in the order in which they encode.

    `itemsize` is the element size in bytes, which blosc's shuffle needs.
    """
    if codec == "raw":
        return (Crc32cCodec(),)
    blosc = BloscCodec(cname="zstd", clevel=1, shuffle="shuffle", typesize=itemsize, blocksize=_BLOSC_BLOCK_BYTES)
    return (blosc, Crc32cCodec())
