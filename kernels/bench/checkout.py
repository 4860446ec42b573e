"""Which commit is measured. A figure without one cannot be checked, so an uncommitted tree is refused."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from kernels.bench.errors import BenchError

ROOT = Path(__file__).resolve().parents[2]
_NAMED = 8


def clean_commit(root: Path = ROOT, *, written: Sequence[Path] = ()) -> str:
    """The commit of a clean checkout, 40 hex characters.

    written: files that a benchmark itself writes; they may differ. Files that git ignores do not count.
    Raises BenchError without a git checkout, or naming the files that are changed, staged or untracked.
    """
    commit = _git(root, "rev-parse", "--verify", "HEAD").strip()
    top = Path(_git(root, "rev-parse", "--show-toplevel").strip()).resolve()
    own = {path.resolve() for path in written}
    entries = iter(_git(root, "status", "--porcelain=v1", "--untracked-files=all", "-z").split("\0"))
    changed = []
    for entry in entries:
        if not entry:
            continue
        if entry[0] in "RC":  # a rename's old name follows as an entry of its own
            next(entries)
        if (top / entry[3:]).resolve() not in own:
            changed.append(entry[3:])
    if changed:
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        raise BenchError(
            f"the tree has uncommitted changes ({', '.join(changed[:_NAMED])}{more}): commit them, or pass --try to "
            "measure without recording"
        )
    return commit


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BenchError(
            "git is not installed, so the measured commit is unknown: pass --try to measure only"
        ) from None
    if done.returncode:
        raise BenchError(
            f"{root} is no git checkout with a commit ({done.stderr.strip()}): clone the repository, or pass --try to "
            "measure without recording"
        )
    return done.stdout
