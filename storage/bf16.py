"""bfloat16 in numpy, which has none: its bits as uint16, its values as float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def round_to_bf16(value: npt.NDArray[np.float32], odd: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Round `value` in place to bf16, to nearest, ties to even: bits uint32, a view of it, the upper half of each bf16.

    The lower halves are left as they come. odd: scratch of the same shape. Not for NaN: no scale and offset give one.
    """
    word = value.view(np.uint32)
    np.right_shift(word, 16, out=odd)
    odd &= 1
    odd += 0x7FFF
    word += odd
    return word


def float32_of(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The values of bf16 `bits`, a new array."""
    word = bits.astype(np.uint32)
    word <<= 16
    return word.view(np.float32)
