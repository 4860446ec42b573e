"""How states lie in an array: four forms, chosen by the step and the codec.

| form | elements of a row of D channels | when |
|---|---|---|
| `codes` | int8 [D] | steps below 0.6 |
| `pairs` | uint8 [ceil(D / 2)]: two codes of -7 .. 7 in each | steps from 0.6 on |
| `planes` | uint8 [2, D]: exponent and first bit of the mantissa; the rest of bfloat16 | lossless, zstd |
| `bits` | uint16 [D]: bfloat16 | lossless, other codecs |

The forms are what makes plain zstd, an entropy coder of bytes, enough. Coarse codes leave 2 bits a value where
Huffman's code words have whole bits: a pair of them a byte loses half as much (7.0 instead of 6.1 x smaller than
bfloat16 at step 0.8, more exceptions included). And in bfloat16 only the exponent is uneven, but it straddles its two
bytes: what compresses and what does not are put into planes with chunks of their own (1.485 x smaller; 1.466 with the
two bytes as planes, 1.43 with blosc's shuffle, which cuts planes where zstd's 128 KiB blocks do not).
Pairs are split again and planes merged after decompression.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from storage.presets import Encoding

Form = Literal["codes", "pairs", "planes", "bits"]
What = Literal["aux", "last"]

PAIRS_FROM_STEP = 0.6
"""From here on the codes beyond +-7 cost less as exceptions than pairs save."""
LARGEST_CODE = 127
LARGEST_PAIRED_CODE = 7
PLANES_FILL = 193
"""What pads planes: a NaN in both, which no target gives."""
_EXPONENT_BASE = np.uint16(31 << 7)
# Rows at once: their scratch stays in a core's cache, at any D that models have.
_BLOCK_ROWS = 16
_PAIR_BASE = 2 * LARGEST_PAIRED_CODE + 1


def _pair_table() -> npt.NDArray[np.uint16]:
    """The two int8 codes of each byte, as they lie in memory; bytes that are no pair give zeros."""
    table = np.zeros((256, 2), dtype=np.int8)
    pairs = np.arange(_PAIR_BASE**2)
    table[pairs, 0] = pairs % _PAIR_BASE - LARGEST_PAIRED_CODE
    table[pairs, 1] = pairs // _PAIR_BASE - LARGEST_PAIRED_CODE
    return table.reshape(-1).view(np.uint16)


_PAIRS = _pair_table()


def step_of(encoding: Encoding, what: What) -> float | None:
    """The step of the states `what`; None when they are lossless."""
    return encoding.aux_step if what == "aux" else encoding.last_step


def form_of(encoding: Encoding, what: What) -> Form:
    """The form in which a store of that encoding keeps the states `what`."""
    step = step_of(encoding, what)
    if step is None:
        return "planes" if encoding.codec == "zstd" else "bits"
    return "pairs" if step >= PAIRS_FROM_STEP else "codes"


def largest_code(form: Form) -> int:
    """The largest magnitude of a code in that form; a value with a larger one is an exception."""
    return LARGEST_PAIRED_CODE if form == "pairs" else LARGEST_CODE


def row_shape(form: Form, hidden_size: int) -> tuple[int, ...]:
    """Shape of one layer's part of a row."""
    return {
        "codes": (hidden_size,),
        "pairs": (-(-hidden_size // 2),),
        "planes": (2, hidden_size),
        "bits": (hidden_size,),
    }[form]


def dtype_of(form: Form) -> str:
    """Numpy name of the array's elements."""
    return {"codes": "int8", "pairs": "uint8", "planes": "uint8", "bits": "uint16"}[form]


def to_form(states: npt.NDArray[Any], form: Form) -> npt.NDArray[Any]:
    """States [..., D] (int8 codes, or uint16 bits) as the array of that form, [..., *row_shape]."""
    if form in ("codes", "bits"):
        return states
    if form == "planes":
        return _planes(states)
    # An odd last channel is paired with a code of 0.
    pairs = np.full((*states.shape[:-1], -(-states.shape[-1] // 2)), LARGEST_PAIRED_CODE * _PAIR_BASE, dtype=np.uint8)
    pairs[..., : states.shape[-1] // 2] += states[..., 1::2].view(np.uint8) * np.uint8(_PAIR_BASE)
    pairs += (states[..., 0::2] + np.int8(LARGEST_PAIRED_CODE)).view(np.uint8)
    return pairs


def from_form(array: npt.NDArray[Any], form: Form, hidden_size: int, *, overwrite: bool = False) -> npt.NDArray[Any]:
    """Undo `to_form`: int8 codes or uint16 bits [..., hidden_size]; the array itself where it is that already.

    overwrite: planes (C-contiguous) are merged where they lie: a long sample's would otherwise be held twice.
    """
    if form in ("codes", "bits"):
        return array
    if form == "planes":
        return _merged(array, overwrite=overwrite)
    codes = np.take(_PAIRS, array).view(np.int8)
    return codes if codes.shape[-1] == hidden_size else np.ascontiguousarray(codes[..., :hidden_size])


def _planes(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint8]:
    """bf16 bits [..., D] as uint8 [..., 2, D].

    With magnitude = bits without the sign, less 31 steps of the exponent, modulo 2^15: plane 0 is bits 6 to 13 of it,
    seven bits of the exponent and one of the mantissa; plane 1 the sign, its bit 14 (0 from 2^-96 to 2^32) and its last
    six. The 31 let one fill value, 193 in both planes, be a NaN.
    """
    hidden = bits.shape[-1]
    flat = np.ascontiguousarray(bits).reshape(-1, hidden)
    planes = np.empty((len(flat), 2, hidden), dtype=np.uint8)
    for start in range(0, len(flat), _BLOCK_ROWS):
        block = flat[start : start + _BLOCK_ROWS]
        magnitude = block & np.uint16(0x7FFF)
        magnitude -= _EXPONENT_BASE
        magnitude &= np.uint16(0x7FFF)
        planes[start : start + _BLOCK_ROWS, 0] = (magnitude >> np.uint16(6)).astype(np.uint8)
        rest = magnitude >> np.uint16(8)
        rest &= np.uint16(0x40)
        magnitude &= np.uint16(0x3F)
        rest |= magnitude
        rest |= (block >> np.uint16(8)) & np.uint16(0x80)
        planes[start : start + _BLOCK_ROWS, 1] = rest
    return planes.reshape(*bits.shape[:-1], 2, hidden)


def _merged(planes: npt.NDArray[np.uint8], *, overwrite: bool) -> npt.NDArray[np.uint16]:
    """Undo `_planes`."""
    hidden = planes.shape[-1]
    flat = planes.reshape(-1, 2, hidden)
    if overwrite:
        assert planes.flags.c_contiguous
        merged = flat.reshape(-1, 2 * hidden).view(np.uint16)  # two planes of bytes are as long as the row they make
    else:
        merged = np.empty((len(flat), hidden), dtype=np.uint16)
    for start in range(0, len(flat), _BLOCK_ROWS):
        out = merged[start : start + _BLOCK_ROWS]
        first, rest = (flat[start : start + _BLOCK_ROWS, plane].astype(np.uint16) for plane in (0, 1))
        np.left_shift(first, np.uint16(6), out=out)
        out |= rest & np.uint16(0x3F)
        out |= (rest & np.uint16(0x40)) << np.uint16(8)
        out += _EXPONENT_BASE
        out &= np.uint16(0x7FFF)
        rest &= np.uint16(0x80)
        rest <<= np.uint16(8)
        out |= rest
    return merged.reshape(*planes.shape[:-2], hidden)
