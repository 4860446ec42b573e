"""Each layout out and in: the same bytes again, one layout from another, and what engines' loaders accept."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.trainer.draft.eagle3 import DraftConfig
from tasks.trainer.errors import InputError
from tasks.trainer.export.about import About, Tau, Training, measured_taus
from tasks.trainer.export.commands import LAYOUTS
from tasks.trainer.export.folder import export_draft, read_exported, write_exported
from tests.trainer.drafts import TARGET_VOCAB, random_draft

ENGINES = Path(__file__).parent / "engines"
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "whole vocabulary": {"vocab_size": TARGET_VOCAB},
    "eagle3.1, two layers": {"variant": "eagle3.1", "num_layers": 2},
    "yarn": {"rope_parameters": YARN},
}
ABOUT = About(
    target="org/target-8B",
    architectures=("LlamaForCausalLM",),
    draft_tokens=5,
    training=Training(
        data_hash="d" * 32, samples=1200, supervised_tokens=340_000, steps=2000, states="offline", fingerprint="f" * 32
    ),
    taus=(
        Tau("all", 64, "chain of 5, greedy", 2.3456, 2.2, 2.5),
        Tau("code | maths", 1, "chain of 5, greedy", 3.0, None, None),
    ),
)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_in_and_out_again(layout: str, shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Red when a byte of weights, config or card is lost on the way in, in this layout or through another."""
    draft = random_draft(torch.float32, **SHAPES[shape])
    export_draft(draft, tmp_path / "out", about=ABOUT, dtype=dtype, layout=layout)
    found = read_exported(tmp_path / "out")
    assert (found.config, found.about, found.layout, found.dtype) == (draft.config, ABOUT, layout, dtype)
    write_exported(found, tmp_path / "again")
    expected = contents(tmp_path / "out")
    assert expected.keys() == {"config.json", "model.safetensors", "README.md"}
    assert contents(tmp_path / "again") == expected
    # Only the speculators layout has an embedding: what has none cannot become one.
    for other in {"sglang", "vllm"} - {layout}:
        write_exported(replace(found, layout=other), tmp_path / other)
        assert contents(tmp_path / other) != expected
        back = replace(read_exported(tmp_path / other), layout=layout, embedding=found.embedding)
        write_exported(back, tmp_path / f"back from {other}")
        assert contents(tmp_path / f"back from {other}") == expected
        with pytest.raises(InputError, match="export the run itself"):
            write_exported(replace(back, layout="speculators", embedding=None), tmp_path / "none")


def schema_of(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((ENGINES / f"{name}.json").read_text())
    return schema


def sizes(config: DraftConfig) -> dict[str, int]:
    """What the shapes of a schema are written in."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "D": config.hidden_size,
        "2D": 2 * config.hidden_size,
        "3D": 3 * config.hidden_size,
        "Q": heads,
        "KV": kv_heads,
        "I": config.intermediate_size,
        "V": config.target_vocab_size,
        "Vd": config.vocab_size,
    }


def faults(folder: Path, config: DraftConfig, engine: str) -> list[str]:
    """What an engine's loader would stop at, or leave unset, by its schema file."""
    schema = schema_of(engine)
    errors = jsonschema.Draft202012Validator(schema["config"]).iter_errors(
        json.loads((folder / "config.json").read_text())
    )
    found = [error.message for error in errors]
    known, places = sizes(config), {}
    left_out = {"draft vocabulary": config.has_full_vocabulary, "fc_norm": not config.fc_norm}
    for place in schema["tensors"]:
        if left_out.get(place.get("when"), False):
            continue
        layers = {"first": [0], "upper": range(1, config.num_layers)}.get(place.get("layers"), range(config.num_layers))
        for name in sorted({place["name"].format(layer=layer) for layer in layers}):
            places[name] = (tuple(known[size] for size in place["shape"]), place["required"])
    read = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for pattern, replacement in schema["renames"].items():
            name = re.sub(pattern, replacement, name)
        if name not in schema["skipped"]:
            read[name] = tuple(tensor.shape)
    found += [f"no place for {name}" for name in read.keys() - places.keys()]
    found += [f"unset: {name}" for name, (_, required) in places.items() if required and name not in read]
    return found + [f"shape of {name}" for name in read.keys() & places.keys() if read[name] != places[name][0]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("layout", "engine"),
    [("sglang", "sglang-0.5.23"), ("sglang", "vllm-0.33.0"), ("vllm", "vllm-0.33.0"),
     ("speculators", "vllm-0.33.0-speculators")],
)  # fmt: skip
def test_engines_loaders_accept_it(layout: str, engine: str, shape: str, tmp_path: Path) -> None:
    """Red when a folder has a key of the wrong kind, lacks a tensor that an engine would leave unset, has one of a
    shape that its parameter refuses, or one that it has no place for: vLLM stops there, SGLang drops it in silence."""
    draft = random_draft(torch.bfloat16, **SHAPES[shape])
    export_draft(draft, tmp_path / "out", about=ABOUT, dtype=torch.bfloat16, layout=layout)
    assert faults(tmp_path / "out", draft.config, engine) == []


def test_a_schema_tells_a_folder_of_another_engine(tmp_path: Path) -> None:
    """Red when the schema files accept anything."""
    draft = random_draft(torch.bfloat16, num_layers=2)
    export_draft(draft, tmp_path / "out", about=ABOUT, dtype=torch.bfloat16, layout="vllm")
    found = faults(tmp_path / "out", draft.config, "sglang-0.5.23")
    assert "unset: layers.1.hidden_norm.weight" in found
    assert "'eagle_config' is a required property" in found
    export_draft(draft, tmp_path / "out", about=ABOUT, dtype=torch.bfloat16, layout="sglang")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["norm.weight"] = torch.ones(33, dtype=torch.bfloat16)
    tensors["output_norm.weight"] = tensors.pop("fc.weight")
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    assert sorted(faults(tmp_path / "out", draft.config, "vllm-0.33.0")) == [
        "no place for model.output_norm.weight", "shape of model.norm.weight", "unset: model.fc.weight",
    ]  # fmt: skip


def test_the_card_says_what_it_is(tmp_path: Path) -> None:
    """Red when a card lacks the target, the data, a line of tau, or its engine's command."""
    commands = {
        "sglang": ["python -m sglang.launch_server --model-path org/target-8B", "vllm serve org/target-8B"],
        "vllm": ["vllm serve org/target-8B --speculative-config"],
        "speculators": ["vllm serve FOLDER\n"],
    }
    for layout in LAYOUTS:
        draft = random_draft(torch.float32, rope_parameters=YARN)
        export_draft(draft, tmp_path / "out", about=ABOUT, dtype=torch.bfloat16, layout=layout)
        card = (tmp_path / "out" / "README.md").read_text()
        for part in (
            "base_model: org/target-8B", "`org/target-8B` checks them", "d" * 32, "f" * 32, "2,000", "48 of 80 tokens",
            "| all | 64 | chain of 5, greedy | 2.346 | 2.20 to 2.50 |",
            "| code \\| maths | 1 | chain of 5, greedy | 3.000 | - |", '"factor": 4.0', "bfloat16", *commands[layout],
        ):  # fmt: skip
            assert part in card, (layout, part)
        assert ("sglang.launch_server" in card) == (layout == "sglang")
    # A path is no hub id: the link would be broken.
    export_draft(draft, tmp_path / "out", about=About("/models/target"), dtype=torch.bfloat16)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model" not in card
    assert "Not measured." in card
    with pytest.raises(InputError, match="which target it is for; name it"):
        export_draft(draft, tmp_path / "none", about=About(""), dtype=torch.bfloat16)


def test_max_positions_and_rope_are_the_targets(tmp_path: Path) -> None:
    """Red when a layout leaves the longest context or the rope's scaling to a reader's default: 2,048 and none."""
    for layout in LAYOUTS:
        draft = random_draft(torch.float32, rope_parameters=YARN, max_position_embeddings=131072)
        export_draft(draft, tmp_path / layout, about=ABOUT, dtype=torch.float32, layout=layout)
        config = json.loads((tmp_path / layout / "config.json").read_text())
        layer = config.get("transformer_layer_config", config)
        assert layer["max_position_embeddings"] == 131072
        assert layer["rope_parameters"] == YARN
        assert (layer["rope_theta"], layer["rope_scaling"]["factor"]) == (5e5, 4.0)


def test_the_table_is_the_evaluation(tmp_path: Path) -> None:
    """Red when a line of the table is of other drafting than was measured, or an older file passes for one."""
    interval = [1.5, 2.5]
    acceptance: dict[str, Any] = {
        "drafting": "tree", "num_draft_tokens": 6, "tree_tokens": 40, "temperature": 0.7, "tau": 2.0,
        "tau_interval": interval, "num_prompts": 12,
        "domains": [{"name": "code", "prompts": 1, "tau": 2.2, "tau_interval": None}],
        "lengthened": [{"context": 8192, "prompts": 4, "tau": 1.8, "tau_interval": interval}],
    }  # fmt: skip
    how = "tree of 40 tokens, depth 6, temperature 0.7"
    assert measured_taus(acceptance, "x") == (
        Tau("all", 12, how, 2.0, 1.5, 2.5),
        Tau("code", 1, how, 2.2, None, None),
        Tau("at 8,192 tokens", 4, how, 1.8, 1.5, 2.5),
    )
    chain = measured_taus({**acceptance, "drafting": "chain", "tree_tokens": None, "temperature": 0.0}, "x")
    assert chain[0].drafting == "chain of 6, greedy"
    del acceptance["lengthened"]
    with pytest.raises(InputError, match=r"evaluation\.json has no 'lengthened'.*run `eyas evaluate`"):
        measured_taus(acceptance, "evaluation.json")
