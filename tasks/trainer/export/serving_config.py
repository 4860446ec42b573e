"""config.json of each serving layout, from a draft's shape and back.

The readers take the auxiliary layer ids from different keys with different meanings:

    key                                             read by             an id k means                  layer 1's output
    eagle_aux_hidden_state_layer_ids (top level)    vLLM, speculators   the state that enters layer k  2
    eagle_config.eagle_aux_hidden_state_layer_ids   SGLang              the output of layer k          1

The `sglang` layout has both, so that vLLM loads it too; `vllm` and `speculators` have the first alone. Norm switches
are written also when false, for readers default them differently: a speculators config without norm_before_residual is
true to vLLM. One is left out: `norm_output` of the `sglang` layout, where it is false. SGLang and vLLM mean by it what
the next step reads, and take it as false where it is missing; SpecForge reads the same folder, means by it whether the
head reads the norm at all, and takes it as true. Missing, all three run the draft that was trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tasks.trainer.draft.eagle3 import DraftConfig
from tasks.trainer.errors import InputError
from tasks.trainer.export.about import About

ARCHITECTURES = {"sglang": "LlamaForCausalLMEagle3", "vllm": "Eagle3LlamaForCausalLM"}
# The speculators package: its architecture, and the version whose schema this is.
SPECULATOR, SPECULATORS_VERSION = "Eagle3Speculator", "0.9.0"
# What drafts of the EAGLE-3 family differ in: a norm of fc's input, or of each layer's part of it; the normed output
# fed to the next step; the residual taken after its norm. And which of them a variant has.
NORM_SWITCHES = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")
_NORMS_OF = {"eagle3": frozenset[str](), "eagle3.1": frozenset(("fc_norm", "norm_output"))}
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def serving_config(config: DraftConfig, *, layout: str, about: About, dtype: torch.dtype) -> dict[str, Any]:
    """config.json as a dict."""
    dtype_name = str(dtype).removeprefix("torch.")
    entering = [layer + 1 for layer in config.aux_layer_ids]
    norms = {switch: switch in _NORMS_OF[config.variant] for switch in NORM_SWITCHES}
    of_draft = {"draft_vocab_size": config.vocab_size, "target_hidden_size": config.hidden_size, _LAYER_IDS: entering}
    dtypes = {"dtype": dtype_name, "torch_dtype": dtype_name}
    facts = {"eyas": about.document()}
    if layout == "speculators":
        return {
            "architectures": [SPECULATOR],
            "speculators_model_type": "eagle3",
            "speculators_version": SPECULATORS_VERSION,
            "speculators_config": _proposals(about),
            "transformer_layer_config": _llama(config),
            **of_draft,
            **norms,
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            **dtypes,
            **facts,
        }
    described = {"architectures": [ARCHITECTURES[layout]], **_llama(config), **of_draft}
    if layout == "sglang":
        described["eagle_config"] = {"use_aux_hidden_state": True, _LAYER_IDS: list(config.aux_layer_ids)}
        if not norms["norm_output"]:
            del norms["norm_output"]
    return {**described, **norms, **dtypes, **facts}


def _llama(config: DraftConfig) -> dict[str, Any]:
    rope = dict(config.rope_parameters)
    theta = float(rope.get("rope_theta", 10000.0))
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    scaled = scaling.get("rope_type", "default") != "default"
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
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
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_position_embeddings,
        # transformers 4 and the engines of its time read the first two, transformers 5 the third.
        "rope_theta": theta,
        "rope_scaling": scaling if scaled else None,
        "rope_parameters": {**scaling, "rope_type": scaling.get("rope_type", "default"), "rope_theta": theta},
    }


def _proposals(about: About) -> dict[str, Any]:
    return {
        "algorithm": "eagle3",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": about.draft_tokens,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": about.target, "architectures": list(about.architectures)},
    }


def layout_of(config: dict[str, Any], path: Path) -> str:
    """Which layout a config.json is of; path: for messages. Raises InputError when it is no EAGLE-3 draft's."""
    if "speculators_model_type" in config:
        if config["speculators_model_type"] == "eagle3":
            return "speculators"
        raise InputError(f"{path}: speculators_model_type is {config['speculators_model_type']!r}, not 'eagle3'")
    for layout, architecture in ARCHITECTURES.items():
        if config.get("architectures") == [architecture]:
            return layout
    known = ", ".join(ARCHITECTURES.values())
    raise InputError(f"{path}: architectures is {config.get('architectures')!r}, not one of {known}")


def flat_config(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The plain keys of a config.json of any layout; path: for messages.

    Raises InputError when it is no EAGLE-3 draft's, or of a kind that Eyas does not train.
    """
    if layout_of(config, path) != "speculators":
        return config
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict) or layer.get("model_type") != "llama":
        kind = layer.get("model_type") if isinstance(layer, dict) else layer
        raise InputError(f"{path}: its layers are of model_type {kind!r}; Eyas reads drafts of 'llama' layers")
    if config.get("embed_requires_grad"):
        raise InputError(f"{path}: embed_requires_grad is true: its embedding was trained, Eyas keeps the target's")
    if "norm_before_residual" not in config:
        raise InputError(
            f"{path}: no key 'norm_before_residual', which vLLM takes as true and speculators as false; write the one "
            "that the draft was trained with"
        )
    nested = ("transformer_layer_config", "speculators_config", "architectures")
    return {**layer, **{key: value for key, value in config.items() if key not in nested}}


def draft_config(config: dict[str, Any], path: Path) -> DraftConfig:
    """The shape in a complete flat config; path: for messages.

    Refuses variants that Eyas lacks, and layer ids that are missing or contradict each other.
    """
    try:
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
            aux_layer_ids=_aux_layer_ids(config, path),
            rope_parameters=config["rope_parameters"],
            num_layers=config["num_hidden_layers"],
            variant=_variant(config, path),
        )
    except KeyError as error:
        raise InputError(f"{path}: no key {error.args[0]!r}; export the draft again") from None


def said_layer_ids(config: dict[str, Any]) -> tuple[list[int] | None, list[int] | None]:
    """(ids that SGLang reads, ids that vLLM reads) of a flat config; None where the key is missing or null."""
    return (config.get("eagle_config") or {}).get(_LAYER_IDS), config.get(_LAYER_IDS)


def _aux_layer_ids(config: dict[str, Any], path: Path) -> tuple[int, int, int]:
    """0-based output layers, from either key."""
    outputs, entering = said_layer_ids(config)
    if outputs is None and entering is None:
        raise KeyError(_LAYER_IDS)
    if outputs is not None and entering is not None and entering != [layer + 1 for layer in outputs]:
        raise InputError(
            f"{path}: {_LAYER_IDS}={entering} is not eagle_config's {outputs} plus one each: vLLM and SGLang would "
            "feed the draft different layers"
        )
    layers = outputs if outputs is not None else [layer - 1 for layer in entering or []]
    if len(layers) != 3:
        raise InputError(f"{path}: {len(layers)} auxiliary layers {layers}; Eyas trains drafts of three")
    return layers[0], layers[1], layers[2]


def _variant(config: dict[str, Any], path: Path) -> str:
    """The variant that has exactly the norms that config.json names."""
    norms = {switch for switch in NORM_SWITCHES if config.get(switch, False)}
    for variant, of_variant in _NORMS_OF.items():
        if norms == of_variant:
            return variant
    shown = ", ".join(f"{switch}={config.get(switch, False)!r}" for switch in NORM_SWITCHES)
    hint = "; where SpecForge wrote norm_output=true, remove the key" if norms == {"norm_output"} else ""
    raise InputError(f"{path}: {shown}: Eyas has no draft.variant with just these norms{hint}")
