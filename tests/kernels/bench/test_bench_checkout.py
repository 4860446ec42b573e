"""Only a commit is measured: what git itself says about a real checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kernels.bench.checkout import clean_commit
from kernels.bench.errors import BenchError


def git(folder: Path, *arguments: str) -> str:
    own = ("-c", "user.name=t", "-c", "user.email=t@t")
    done = subprocess.run(["git", "-C", str(folder), *own, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "kernel.py").write_text("x = 1\n")
    (tmp_path / "results.csv").write_text("a\n")
    (tmp_path / ".gitignore").write_text("build/\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_a_clean_checkout_gives_its_commit(checkout: Path) -> None:
    """Red when ignored files, or the results that benchmarks append to, count as changes."""
    (checkout / "build").mkdir()
    (checkout / "build/kernel.o").write_text("")
    (checkout / "results.csv").write_text("a\nb\n")
    (checkout / "results.raw.jsonl").write_text("{}\n")
    written = [checkout / "results.csv", checkout / "results.raw.jsonl"]
    assert clean_commit(checkout, written=written) == git(checkout, "rev-parse", "HEAD")
    with pytest.raises(BenchError, match=r"results\.csv, results\.raw\.jsonl"):
        clean_commit(checkout)


@pytest.mark.parametrize("change", ["edited", "staged", "untracked", "renamed", "deleted"])
def test_every_kind_of_change_is_refused_by_name(checkout: Path, change: str) -> None:
    """Red when a figure could come from code that no commit holds."""
    kernel, name = checkout / "kernel.py", "kernel.py"
    if change in ("edited", "staged"):
        kernel.write_text("x = 2\n")
    if change == "staged":
        git(checkout, "add", "kernel.py")
    if change == "untracked":
        name = "new file.py"
        (checkout / name).write_text("")
    if change == "renamed":
        name = "other.py"
        git(checkout, "mv", "kernel.py", name)
    if change == "deleted":
        kernel.unlink()
    with pytest.raises(BenchError, match=rf"uncommitted changes \({name}\)"):
        clean_commit(checkout)


def test_no_checkout_is_refused(tmp_path: Path) -> None:
    """Red when a copy of the files without its history is measured as if it were a commit."""
    with pytest.raises(BenchError, match="no git checkout"):
        clean_commit(tmp_path)
