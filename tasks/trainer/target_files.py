"""Where a target's files lie: resolving names, hashing weights, unpacking GGUF.

A GGUF is dequantised once into a safetensors folder in the cache (`EYAS_CACHE`, default ~/.cache/eyas): transformers
parses its tokenizer arrays in Python, about 17 s for a 135M model at each load, and every stage of a run loads it. The
price is the disk for a dense copy.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tasks.trainer.errors import InputError

logger = logging.getLogger(__name__)

PACKAGE_SCHEME = "package://"


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """A target on this machine.

    name: what the user wrote; folder: the model folder (for a GGUF, the one that holds the file); gguf: file name
    inside `folder`, or None for safetensors.
    """

    name: str
    folder: Path
    gguf: str | None


def resolve(model: str, *, revision: str | None = None) -> TargetFiles:
    """Find the files of `model`: a folder, a .gguf file, package://NAME/FILE or a hub id (downloaded).

    Raises InputError when there is nothing of that name, or the folder has no safetensors weights.
    """
    path = _package_file(model) if model.startswith(PACKAGE_SCHEME) else Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError(f"target.model={model!r} is a file but not a .gguf; give the model's folder")
        return TargetFiles(model, path.parent, path.name)
    if path.is_dir():
        folder = path
    elif model.startswith((PACKAGE_SCHEME, "/", ".", "~")) or model.endswith(".gguf") or model.count("/") > 1:
        raise InputError(f"target.model={model!r}: no such file or folder")
    else:
        folder = _download(model, revision)
    if not (folder / "config.json").is_file():
        raise InputError(f"target.model={model!r}: {folder} has no config.json; give a model folder or a .gguf file")
    if not list(folder.glob("*.safetensors")):
        raise InputError(
            f"target.model={model!r}: no *.safetensors in {folder}; Eyas unpickles no .bin weights, convert them first"
        )
    return TargetFiles(model, folder, None)


def _package_file(model: str) -> Path:
    package, _, inside = model.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"target.model={model!r}: the Python package {package!r} is not installed")
    return Path(spec.submodule_search_locations[0]) / inside


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
            )
        )
    except (RepositoryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"target.model={model!r} is no folder here and could not be fetched from the hub: {reason}"
        ) from None


def weights_digest(files: TargetFiles) -> str:
    """blake2b over the names and bytes of the weight files, about 1 s per GB."""
    paths = [files.folder / files.gguf] if files.gguf else sorted(files.folder.glob("*.safetensors"))
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, hashlib.blake2b).digest())
    return digest.hexdigest()


def unpacked(files: TargetFiles, dtype_name: str) -> Path:
    """The folder to load safetensors, config and tokenizer from; a GGUF is unpacked into the cache first."""
    if files.gguf is None:
        return files.folder
    cache = Path(os.environ.get("EYAS_CACHE", "~/.cache/eyas")).expanduser() / "gguf"
    home = cache / f"{weights_digest(files)}-{dtype_name}"
    if not home.is_dir():
        logger.info("unpacking %s into %s (once)", files.gguf, home)
        with _fresh_folder(home) as scratch:
            _unpack(files, dtype_name, scratch)
    return home


@contextmanager
def _fresh_folder(home: Path) -> Iterator[Path]:
    """A scratch folder beside `home` that becomes `home` when the block succeeds; a killed run leaves no `home`."""
    home.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{home.name}-", dir=home.parent))
    try:
        yield scratch
        try:
            scratch.rename(home)
        except OSError:
            if not home.is_dir():  # another process was faster: its copy is as good
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _unpack(files: TargetFiles, dtype_name: str, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(files.folder, gguf_file=files.gguf)
    model = AutoModelForCausalLM.from_pretrained(
        files.folder,
        gguf_file=files.gguf,
        dtype=getattr(torch, dtype_name),
        # Without it recent transformers keep the weights packed.
        quantization_config=GgufConfig(dequantize=True),
    )
    # The dense copy is an ordinary checkpoint: it must not ask for GGUF handling when loaded again.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
