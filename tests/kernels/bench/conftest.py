"""Rows made up for tests of what is read out of results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from kernels.bench.results import Row


@pytest.fixture
def row() -> Callable[..., Row]:
    """A row with everything filled in; keyword arguments replace cells."""
    made = Row(
        run="20260101T000000Z-00aa", work="attention", variant="fused", tokens=1024, vocab=None, supervised=1.0,
        shape="one document; 7 steps", ms=2.0, peak_gib=4.0, extra_gib=1.0, error=1e-3, tokens_per_s=512000.0, gpus=1,
        gpu="NVIDIA H200", versions="torch 2.11.0", commit="c" * 40,
    )  # fmt: skip

    def make(**cells: Any) -> Row:
        return dataclasses.replace(made, **cells)

    return make
