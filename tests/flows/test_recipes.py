"""The recipes: complete configs that parse, and whose words about shapes and memory agree with the published models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from flows.cli import RECIPES, main
from tasks.trainer.config import Offline, Online
from tasks.trainer.draft.eagle3 import DraftConfig, Eagle3Draft
from tasks.trainer.draft.rope import Rope
from tasks.trainer.draft.shape import draft_shape
from tasks.trainer.recipe import load_config, read_config
from tasks.trainer.target_text import default_aux_layer_ids

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Published:
    """A model as its authors publish it."""

    name: str
    """On the hub."""
    config: Any
    """transformers' config, with the values of the published config.json."""
    billions: float
    """Parameters by the model card: what the config must add up to."""


def qwen3(kind: Callable[..., Any], **sizes: int) -> Any:
    return kind(
        vocab_size=151936, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **sizes,
    )  # fmt: skip


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
PUBLISHED = {
    "qwen3-8b": Published("Qwen/Qwen3-8B", qwen3(
        Qwen3Config, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8), 8.2),
    "qwen3-14b": Published("Qwen/Qwen3-14B", qwen3(
        Qwen3Config, hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=8), 14.8),
    "qwen3-30b-a3b": Published("Qwen/Qwen3-30B-A3B", qwen3(
        Qwen3MoeConfig, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8), 30.5),
    "qwen3-235b-a22b": Published("Qwen/Qwen3-235B-A22B", qwen3(
        Qwen3MoeConfig, hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=94,
        num_attention_heads=64, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8), 235.1),
    "llama-3.1-8b": Published("meta-llama/Llama-3.1-8B-Instruct", LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5,
        tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE), 8.03),
}  # fmt: skip
# Parameters of the draft in millions: fc 3 D^2, q 2 D x heads x 128, k and v 2 D x kv x 128 each, o, MLP 3 D x width,
# head 32,000 D, norms.
DRAFT_MILLIONS = {
    "qwen3-8b": 400, "qwen3-14b": 610, "qwen3-30b-a3b": 145, "qwen3-235b-a22b": 442, "llama-3.1-8b": 425,
}  # fmt: skip
MODES = {"online": Online, "offline": Offline}


def text_of(name: str) -> str:
    return (RECIPES / f"{name}.yaml").read_text()


def shape_of(model: str) -> DraftConfig:
    """The draft that the recipes of a model train."""
    published = PUBLISHED[model].config
    config = read_config(str(RECIPES / f"{model}-online.yaml"))
    return draft_shape(
        published,
        config.draft,
        vocab_size=config.draft.vocab_size or published.vocab_size,
        target_vocab_size=published.vocab_size,
        aux_layer_ids=default_aux_layer_ids(published.num_hidden_layers),
    )


def draft_parameters(model: str) -> int:
    """Counted on a draft without weights, and without llama3's RoPE, which has none and cannot be built so."""
    shape = shape_of(model)
    with torch.device("meta"):
        draft = Eagle3Draft(
            dataclasses.replace(shape, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
            embedding=torch.empty(shape.target_vocab_size, shape.hidden_size),
            d2t=torch.empty(shape.vocab_size, dtype=torch.int64),
            t2d=torch.empty(shape.target_vocab_size, dtype=torch.bool),
        )
    return sum(parameter.numel() for parameter in draft.parameters())


def target_gib(model: str) -> float:
    """Of the target's weights in bfloat16."""
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(PUBLISHED[model].config)
    return float(sum(parameter.numel() for parameter in target.parameters()) * 2 / GIB)


def test_there_are_both_modes_of_every_model_and_the_demo() -> None:
    """Red when a recipe is missing, or one is there that nothing here checks."""
    expected = {f"{model}-{mode}" for model in PUBLISHED for mode in MODES}
    assert {path.stem for path in RECIPES.glob("*.yaml")} == expected | {"demo"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", PUBLISHED)
def test_recipes_are_complete_configs_of_16k(model: str, mode: str) -> None:
    """Red when a recipe does not resolve, is of another model, context or mode, or two share a run directory."""
    config = read_config(str(RECIPES / f"{model}-{mode}.yaml"))
    assert config.target.model == PUBLISHED[model].name
    assert config.data.max_tokens == config.train.pack_tokens == 16384
    assert isinstance(config.hidden_states, MODES[mode])
    assert config.run_dir == f"runs/{model}-{mode}"
    assert config.train.evaluates
    assert load_config(config.model_dump(mode="json")) == config
    first = text_of(f"{model}-{mode}").splitlines()[0]
    assert mode in first
    assert "16K" in first


@pytest.mark.parametrize("model", PUBLISHED)
def test_both_modes_train_the_same_draft(model: str) -> None:
    """Red when the recipes of the two modes differ in more than the states, memory, and where they leave the run."""
    online, offline = (read_config(str(RECIPES / f"{model}-{mode}.yaml")).model_dump() for mode in MODES)
    for config in (online, offline):
        for key in ("hidden_states", "run_dir"):
            config.pop(key)
        for key in ("checkpointing", "mlp_chunk_rows"):
            config["train"].pop(key)
    assert online == offline


@pytest.mark.parametrize("model", PUBLISHED)
def test_shapes_follow_the_published_config(model: str) -> None:
    """Red when a published config here is mistyped (its parameters must add up to the model card's), the draft does not
    take its widths from it, or positions end before the recipe's context."""
    published, shape = PUBLISHED[model], shape_of(model)
    assert target_gib(model) * GIB / 2e9 == pytest.approx(published.billions, rel=0.004)
    config = published.config
    assert (shape.hidden_size, shape.num_heads, shape.num_kv_heads) == (
        config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
    )  # fmt: skip
    assert (shape.head_dim, shape.intermediate_size) == (128, config.intermediate_size)
    assert (shape.vocab_size, shape.target_vocab_size) == (32000, config.vocab_size)
    assert shape.max_position_embeddings >= 16384 + 7
    assert shape.rms_norm_eps == config.rms_norm_eps
    assert shape.rope_parameters["rope_theta"] == config.rope_parameters["rope_theta"]
    low, middle, high = shape.aux_layer_ids
    assert 0 < low < middle < high < config.num_hidden_layers
    Rope(shape)  # whose kind must be known
    assert draft_parameters(model) / 1e6 == pytest.approx(DRAFT_MILLIONS[model], rel=0.005)


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_recipe_says_what_its_target_takes(model: str) -> None:
    """Red when a recipe's figure is not the target's size, or one that no single GPU holds does not say so."""
    size = target_gib(model)
    for mode in MODES:
        text = text_of(f"{model}-{mode}")
        if mode == "online" or size > 40:
            assert f"{size:.1f} GiB" in text or f"{size:.0f} GiB" in text
        # The largest GPU in wide use holds 288 GB; the weights alone are a lower bound.
        assert ("SEVERAL GPUS" in text) == (size > 268)
    # Masters, moments, weights and gradients of the draft: 20 bytes a parameter, beside the target's weights.
    draft = draft_parameters(model) * 20 / GIB
    if size <= 268:
        assert "80 GB" in text_of(f"{model}-online")
        assert size + draft < 80e9 / GIB


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_recipe_says_what_its_store_takes(model: str) -> None:
    """Red when a recipe's bytes a token are not those of its hidden size."""
    raw = 8 * PUBLISHED[model].config.hidden_size
    text = text_of(f"{model}-offline")
    assert f"{raw // 1024} KiB a token in bfloat16" in text
    # The presets' ratios as the form tells them: near 2.8 x, lossless 1.48 x.
    assert f"about {raw / 2.8 / 1e3:.0f} KB as `near`" in text
    assert f"at {raw / 1.48 / 1e3:.0f} KB" in text


def test_recipes_are_listed_and_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Red when `eyas recipes` misses one, prints anything but the file, or a wrong name is no one-line error."""

    def output(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exit_:
            main(["recipes", *arguments])
        assert not exit_.value.code
        return capsys.readouterr().out

    assert [line.split()[0] for line in output().splitlines()] == sorted(path.stem for path in RECIPES.glob("*.yaml"))
    assert output("qwen3-8b-offline") == text_of("qwen3-8b-offline")
    with pytest.raises(SystemExit):
        main(["recipes", "qwen3-8b-ofline"])
    assert capsys.readouterr().err == (
        "error: there is no recipe 'qwen3-8b-ofline'; did you mean 'qwen3-8b-offline'?\n"
    )
