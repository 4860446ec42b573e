"""Multiply a gradient by a scalar that stays on the device: what a backward does whose gradients the forward computed.

This module imports triton; its callers import it only when it runs.
"""

# mypy: allow-untyped-calls, allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (triton has no annotations, and its kernels take pointers, which have no type here)
from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _scale_kernel(gradient_pointer, factor_pointer, num_rows, num_columns, row_stride, column_stride,
                  BLOCK: tl.constexpr):  # fmt: skip
    """gradient *= factor, the product in float32; nothing is read or written when the factor is 1, as in training."""
    factor = tl.load(factor_pointer)
    if factor != 1.0:
        for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            gradient_row = gradient_pointer + tl.cast(row, tl.int64) * row_stride
            block_columns = tl.arange(0, BLOCK).to(tl.int64)
            for start in range(0, num_columns, BLOCK):
                columns = start + block_columns
                inside = columns < num_columns
                pointers = gradient_row + columns * column_stride
                gradient = tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * factor
                tl.store(pointers, gradient.to(gradient_pointer.dtype.element_ty), mask=inside)


@lru_cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # interpreted: few programs, so that tests see one program take several rows
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def row_grid(num_rows: int, programs_per_processor: int, device: torch.device) -> tuple[int]:
    """The grid of a kernel whose programs walk over rows; programs_per_processor 0: a program a row."""
    if programs_per_processor == 0:
        return (num_rows,)
    return (min(num_rows, programs_per_processor * _num_processors(device)),)


def scale_in_place(gradient: Tensor, factor: Tensor) -> None:
    """gradient [N, C], any strides, times the scalar factor."""
    num_rows, num_columns = gradient.shape
    if gradient.numel():
        with torch.cuda.device_of(gradient):
            _scale_kernel[row_grid(num_rows, 8, gradient.device)](
                gradient,
                factor.to(torch.float32),
                num_rows,
                num_columns,
                *gradient.stride(),
                BLOCK=min(triton.next_power_of_2(num_columns), 4096),
                num_warps=8,
            )
