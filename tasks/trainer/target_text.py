"""All that is known of a target without loading its weights: tokenizer, template, layer ids, fingerprint, dtype."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from tasks.trainer.errors import InputError
from tasks.trainer.target_files import TargetFiles, resolve, unpacked, weights_digest


def pick_device(device: str) -> str:
    """`auto` is cuda where there is one. Raises InputError for cuda without a device."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("train.device=cuda, but torch sees no CUDA device here; use auto or cpu")
    return device


def pick_dtype(dtype: str, device: str, *, checkpoint_dtype: torch.dtype | None = None) -> torch.dtype:
    """`auto`: on a CPU bfloat16 only where the processor multiplies it natively (elsewhere it is emulated, several
    times slower than float32); on a GPU the checkpoint's own type, bfloat16 where there is none."""
    if dtype != "auto":
        picked = getattr(torch, dtype)
        assert isinstance(picked, torch.dtype)
        return picked
    if device == "cpu":
        return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    return checkpoint_dtype or torch.bfloat16


def files_dtype(files: TargetFiles, dtype: str, device: str) -> torch.dtype:
    """The weights' type after loading: pick_dtype with the checkpoint's own type."""
    checkpoint_dtype = None if files.gguf else AutoConfig.from_pretrained(files.folder).get_text_config().dtype
    return pick_dtype(dtype, device, checkpoint_dtype=checkpoint_dtype)


@dataclass(frozen=True, slots=True)
class TargetText:
    """A target as the data sees it.

    tokenizer with its chat template; eos_token_ids: every id that ends a turn, ascending; config: transformers' text
    config; aux_layer_ids: 0-based output layers; fingerprint: 24 hex characters, see `fingerprint`.
    """

    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    config: Any
    aux_layer_ids: tuple[int, int, int]
    fingerprint: str


def load_text(
    model: str,
    *,
    dtype: str,
    aux_layer_ids: Sequence[int] | None,
    chat_template: str | None,
    revision: str | None,
    device: str,
) -> TargetText:
    """Read tokenizer and configs, hash the weights (about 1 s per GB).

    Raises InputError when there is no such model, no chat template, or it has too few layers for the auxiliary ones.
    """
    files = resolve(model, revision=revision)
    torch_dtype = files_dtype(files, dtype, device)
    folder = unpacked(files, str(torch_dtype).removeprefix("torch."))
    config = AutoConfig.from_pretrained(folder).get_text_config()
    num_layers = int(config.num_hidden_layers)
    ids = default_aux_layer_ids(num_layers) if aux_layer_ids is None else check_aux_layer_ids(aux_layer_ids, num_layers)
    tokenizer = load_tokenizer(files, folder, chat_template=chat_template)
    return TargetText(
        tokenizer=tokenizer,
        eos_token_ids=find_eos_token_ids(folder, tokenizer),
        config=config,
        aux_layer_ids=ids,
        fingerprint=fingerprint(files, tokenizer, ids, torch_dtype),
    )


def default_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """0-based output layers 1, L//2-1, L-4 (the default of SGLang and vLLM).

    Raises InputError when they are not three different layers in ascending order, which needs L >= 8.
    """
    ids = (1, num_layers // 2 - 1, num_layers - 4)
    if not 0 <= ids[0] < ids[1] < ids[2]:
        raise InputError(
            f"the target has {num_layers} layers: the default auxiliary layers {ids} are not three ascending layers; "
            "set target.aux_layer_ids, for example [0, 1, 2] (it needs at least 3 layers)"
        )
    return ids


def check_aux_layer_ids(ids: Sequence[int], num_layers: int) -> tuple[int, int, int]:
    """Three different layers of the target, ascending. Raises InputError otherwise."""
    if len(ids) != 3 or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= num_layers:
        raise InputError(
            f"target.aux_layer_ids={list(ids)}: give three different ascending layers from 0 to {num_layers - 1}"
        )
    return ids[0], ids[1], ids[2]


def load_tokenizer(files: TargetFiles, folder: Path, *, chat_template: str | None) -> Any:
    """The target's tokenizer. chat_template: path of a Jinja file that replaces its template.

    Raises InputError when the file cannot be read or there is no template at all.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"target.chat_template={chat_template!r}: {error.strerror}") from None
    if not tokenizer.chat_template:
        raise InputError(
            f"target {files.name!r} has no chat template; set target.chat_template to a Jinja file, for example that "
            "of the instruction-tuned model of the same family"
        )
    return tokenizer


def find_eos_token_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends generation: of the generation config, the model config and the tokenizer, ascending."""
    ids: set[int] = set()
    found = [tokenizer.eos_token_id, AutoConfig.from_pretrained(folder).get_text_config().eos_token_id]
    if (folder / "generation_config.json").is_file():
        found.append(GenerationConfig.from_pretrained(folder).eos_token_id)
    for entry in found:
        if isinstance(entry, int):
            ids.add(entry)
        elif entry is not None:
            ids.update(int(i) for i in entry)
    return tuple(sorted(ids))


def fingerprint(files: TargetFiles, tokenizer: Any, aux_layer_ids: Sequence[int], dtype: torch.dtype) -> str:
    """What decides the captured states: weights, tokenizer, chat template, layer ids, dtype. 24 hex characters."""
    parts = {
        "weights": weights_digest(files),
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "chat_template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
        "aux_layer_ids": list(aux_layer_ids),
        "dtype": str(dtype),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]
