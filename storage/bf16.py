"""bfloat16 in numpy, which has none: its bits as uint16, its values as float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def round_to_bf16(value: npt.NDArray[np.float32], odd: npt.NDArray[np.uint32], out: npt.NDArray[np.uint16]) -> None:
    """bf16 bits of float32 `value` (destroyed), to nearest, ties to even. Not for NaN: no scale and offset give one."""
    word = value.view(np.uint32)
    np.right_shift(word, 16, out=odd)
    odd &= 1
    odd += 0x7FFF
    word += odd
    out[...] = word.view(np.uint16)[:, 1::2]


def float32_of(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The values of bf16 `bits`, a new array."""
    word = bits.astype(np.uint32)
    word <<= 16
    return word.view(np.float32)
