"""The serving folder that SGLang and vLLM load: config.json and model.safetensors in the SGLang (SpecForge) layout.

The two engines read the auxiliary layer ids from different keys with different meanings, so both keys are written:

    key                                             read by   an id k means                       layer 1's output is
    eagle_aux_hidden_state_layer_ids (top level)    vLLM      the state that enters layer k       2
    eagle_config.eagle_aux_hidden_state_layer_ids   SGLang    the output of layer k               1

Every norm switch is written, also when false: readers default them differently. The folder is written beside
its place and renamed, so that a reader sees all of it or nothing. The target's embedding is left out: engines share
the target's own, and a copy would be the largest tensor of the file.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tasks.trainer.draft.eagle3 import DraftConfig, Eagle3Draft
from tasks.trainer.errors import InputError
from tasks.trainer.export.layout import draft_tensors, layout_tensors
from tasks.trainer.files import sync_file, sync_folder

ARCHITECTURE = "LlamaForCausalLMEagle3"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
# What drafts of the EAGLE-3 family differ in: a norm of fc's input, or of each layer's part of it; the normed output
# fed to the next step; the residual taken after its norm. And which of them a variant has.
NORM_SWITCHES = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")
_NORMS_OF = {"eagle3": frozenset[str](), "eagle3.1": frozenset(("fc_norm", "norm_output"))}


def export_draft(draft: Eagle3Draft, folder: Path, *, target_name: str, dtype: torch.dtype) -> None:
    """Write the serving folder: weights in `dtype`, the vocabulary maps as they are.

    target_name: recorded for people; engines get the target from their command line. An earlier export in `folder` is
    replaced. Raises InputError when `folder` holds anything else, or cannot be written.
    """
    folder = Path(os.path.abspath(folder))
    _check_place(folder)
    tensors = layout_tensors(draft, dtype)
    config = serving_config(draft.config, target_name=target_name, dtype=dtype)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise InputError(f"cannot write an export at {str(folder)!r}: {error.strerror}") from None
    try:
        scratch.chmod(0o755)  # mkdtemp makes it private, and the server may run as another user
        save_file(tensors, scratch / WEIGHTS_FILE, metadata={"format": "pt"})
        (scratch / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for path in (scratch / WEIGHTS_FILE, scratch / CONFIG_FILE):
            sync_file(path)
        sync_folder(scratch)
        _put_in_place(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def serving_config(config: DraftConfig, *, target_name: str, dtype: torch.dtype) -> dict[str, Any]:
    """config.json as a dict."""
    dtype_name = str(dtype).removeprefix("torch.")
    rope = dict(config.rope_parameters)
    theta = float(rope.get("rope_theta", 10000.0))
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    scaled = scaling.get("rope_type", "default") != "default"
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.target_vocab_size,
        "draft_vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_position_embeddings,
        # transformers 4 and the engines of its time read the first two, transformers 5 the third.
        "rope_theta": theta,
        "rope_scaling": scaling if scaled else None,
        "rope_parameters": {**scaling, "rope_type": scaling.get("rope_type", "default"), "rope_theta": theta},
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.aux_layer_ids],
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        },
        **{switch: switch in _NORMS_OF[config.variant] for switch in NORM_SWITCHES},
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
        "eyas": {"target": target_name},
    }


def load_exported(folder: Path, *, embedding: Tensor) -> Eagle3Draft:
    """Load an exported draft in the dtype it was saved in, on the embedding's device.

    embedding [V, D]: the target's, which an export does not carry; it is cast to the weights' dtype.
    Raises InputError naming the file, key or tensor that is missing or does not fit.
    """
    folder = Path(folder)
    config = draft_config(_read_config(folder), folder / CONFIG_FILE)
    if tuple(embedding.shape) != (config.target_vocab_size, config.hidden_size):
        raise InputError(
            f"{folder}: this draft's target has an embedding of {(config.target_vocab_size, config.hidden_size)}, "
            f"the given target one of {tuple(embedding.shape)}; give the target it was trained for"
        )
    tensors = draft_tensors(_read_tensors(folder / WEIGHTS_FILE), config, folder / WEIGHTS_FILE)
    dtype = tensors["fc.weight"].dtype
    draft = Eagle3Draft(config, embedding=embedding.to(dtype), d2t=tensors["d2t"], t2d=tensors["t2d"])
    draft.to(embedding.device, dtype).load_state_dict(tensors)
    return draft


def _check_place(folder: Path) -> None:
    """Only nothing, an empty folder or an earlier export may be written over."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir():
        raise InputError(f"{str(folder)!r} is not a folder; give another place for the export")
    names = {path.name for path in folder.iterdir()}
    if not names:
        return
    foreign = sorted(names - {CONFIG_FILE, WEIGHTS_FILE})
    if not foreign and CONFIG_FILE in names and "eyas" in _read_config(folder):
        return
    raise InputError(
        f"{str(folder)!r} holds {(foreign or sorted(names))[0]!r}, which Eyas did not export; give another folder"
    )


def _put_in_place(scratch: Path, folder: Path) -> None:
    """Rename into place. An earlier export steps aside first: rename() does not replace a folder that has files. Killed
    between the two renames, the earlier export remains beside its place, whole, under the hidden name."""
    aside = scratch.with_name(scratch.name + "-old")
    replaces = folder.is_dir() and any(folder.iterdir())
    if replaces:
        folder.rename(aside)
    try:
        scratch.rename(folder)
    except OSError:
        if replaces:
            aside.rename(folder)
        raise
    sync_folder(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}; is it an exported draft?") from None
    except ValueError:
        raise InputError(f"{path}: not valid JSON; export the draft again") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return config


def draft_config(config: dict[str, Any], path: Path) -> DraftConfig:
    """The shape in a complete config.json; path: for messages.

    Refuses other architectures, variants, and layer ids that contradict each other.
    """
    if config.get("architectures") != [ARCHITECTURE]:
        raise InputError(f"{path}: architectures is {config.get('architectures')!r}, not [{ARCHITECTURE!r}]")
    try:
        layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        entering = config["eagle_aux_hidden_state_layer_ids"]
        if len(layers) != 3 or entering != [layer + 1 for layer in layers]:
            raise InputError(
                f"{path}: eagle_aux_hidden_state_layer_ids={entering} is not eagle_config's {layers} plus one each: "
                "vLLM and SGLang would feed the draft different layers"
            )
        return DraftConfig(
            hidden_size=config["hidden_size"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            intermediate_size=config["intermediate_size"],
            vocab_size=config["draft_vocab_size"],
            target_vocab_size=config["vocab_size"],
            rms_norm_eps=config["rms_norm_eps"],
            max_position_embeddings=config["max_position_embeddings"],
            aux_layer_ids=(layers[0], layers[1], layers[2]),
            rope_parameters=config["rope_parameters"],
            num_layers=config["num_hidden_layers"],
            variant=_variant(config, path),
        )
    except KeyError as error:
        raise InputError(f"{path}: no key {error.args[0]!r}; export the draft again") from None


def _variant(config: dict[str, Any], path: Path) -> str:
    """The variant that has exactly the norms that config.json names."""
    norms = {switch for switch in NORM_SWITCHES if config.get(switch, False)}
    for variant, of_variant in _NORMS_OF.items():
        if norms == of_variant:
            return variant
    shown = ", ".join(f"{switch}={config.get(switch, False)!r}" for switch in NORM_SWITCHES)
    raise InputError(f"{path}: {shown}: Eyas has no draft.variant with just these norms")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise InputError(f"no file {str(path)!r}; is it an exported draft?")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    except SafetensorError as error:
        raise InputError(f"{path}: damaged ({str(error).splitlines()[0]}); export the draft again") from None
