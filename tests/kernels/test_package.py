"""`kernels` is also the name of a Hugging Face package that transformers looks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def run(code: str) -> str:
    finished = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_transformers_does_not_take_us_for_the_hugging_face_package() -> None:
    """Red when kernels gets a __version__, or our distribution a version, that satisfies transformers' probe."""
    found = run(
        "import kernels, transformers.utils; print(transformers.utils.is_kernels_available(), "
        "hasattr(kernels, '__version__'), kernels.__file__)"
    )
    assert found == f"False False {REPOSITORY / 'kernels' / '__init__.py'}"


def test_everything_but_the_triton_backend_works_without_triton() -> None:
    """Red when a module imports triton at its top, or the error for asking for it anyway is another."""
    found = run(
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from kernels import ttt_attention\n"
        "from kernels.soft_target_loss import choose_loss_backend, soft_target_loss\n"
        "row = dict(target_index=torch.zeros(1, dtype=torch.int64), target_lse=torch.zeros(1), weight=1.0)\n"
        "soft_target_loss(torch.zeros(1, 3), torch.zeros(1, 3), backend='torch', **row)\n"
        "print(choose_loss_backend('auto', 'cuda'))\n"
        "try: soft_target_loss(torch.zeros(1, 3), torch.zeros(1, 3), backend='triton', **row)\n"
        "except ValueError as error: print(error)\n"
    )
    assert found.splitlines() == [
        "('torch', 'triton is not installed')",
        "loss backend 'triton' cannot run: triton is not installed; use 'torch'",
    ]
