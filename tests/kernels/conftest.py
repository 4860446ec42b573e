"""Where there is no CUDA device, triton's kernels are interpreted: decided here, before anything imports them."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    os.environ["TRITON_INTERPRET"] = "1"
    # Triton decides when it is imported, and transformers, which other tests' conftest loads first, has imported it
    # by now: import it anew. (Not its compiled part, which holds no such decision and cannot be loaded twice.)
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and "._C" not in name]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, none is available")
    return torch.device("cuda")
