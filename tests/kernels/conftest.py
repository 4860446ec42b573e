"""The device that kernel tests run on. Without CUDA triton's kernels are interpreted: tests/conftest.py sees to it."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, none is available")
    return torch.device("cuda")
