"""The serving folder: what engines read from it, and our own way back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.errors import InputError
from tasks.trainer.export import folder as folders
from tasks.trainer.export.about import About
from tasks.trainer.export.folder import export_draft, load_exported
from tasks.trainer.export.serving_config import serving_config
from tasks.trainer.target import Target
from tests.trainer.drafts import TARGET_VOCAB, random_draft

VOCAB = TARGET_VOCAB
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "whole vocabulary": {"vocab_size": VOCAB},
    "eagle3.1": {"variant": "eagle3.1"},
}


def make_draft(**changes: Any) -> Eagle3Draft:
    shape = {"intermediate_size": 24, "vocab_size": 20, "max_position_embeddings": 256, "aux_layer_ids": (1, 3, 6),
             "rms_norm_eps": 1e-6}  # fmt: skip
    return random_draft(torch.float32, **{**shape, **changes})


def export(draft: Eagle3Draft, folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    export_draft(draft, folder, about=About("org/target"), dtype=dtype)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e5}, YARN], ids=["default", "yarn"])
@pytest.mark.parametrize("shape", SHAPES)
def test_round_trip(dtype: torch.dtype, rope: dict[str, Any], shape: str, tmp_path: Path) -> None:
    """Red when a tensor, a dtype or any field of the shape is lost on the way: weights, maps and logits are equal."""
    draft = make_draft(rope_parameters=rope, **SHAPES[shape])
    export(draft, tmp_path / "out", dtype)
    loaded = load_exported(tmp_path / "out", embedding=draft.embedding)
    assert loaded.config == draft.config
    expected = draft.to(dtype)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
        assert loaded.state_dict()[name].dtype == tensor.dtype
    assert torch.equal(loaded.embedding, expected.embedding)
    hidden = torch.rand(5, 96).to(dtype)
    positions = torch.arange(100, 105)
    with torch.no_grad():
        pair = [d.qkv(d.embed(torch.arange(5)), d.fuse(hidden), positions) for d in (loaded, expected)]
    for ours, theirs in zip(*pair, strict=True):
        assert torch.equal(ours, theirs)


def test_tensors_are_those_engines_know(tmp_path: Path) -> None:
    """Red when a name, a shape or the meaning of a map differs from the layout: vLLM raises on unknown names, SGLang
    drops them without a word, and both read d2t as an offset."""
    draft = make_draft()
    export(draft, tmp_path / "out", torch.bfloat16)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (32, 96),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.post_attention_layernorm.weight": (32,),
        "midlayer.self_attn.q_proj.weight": (64, 64),
        "midlayer.self_attn.k_proj.weight": (32, 64),
        "midlayer.self_attn.v_proj.weight": (32, 64),
        "midlayer.self_attn.o_proj.weight": (32, 64),
        "midlayer.mlp.gate_proj.weight": (24, 32),
        "midlayer.mlp.up_proj.weight": (24, 32),
        "midlayer.mlp.down_proj.weight": (32, 24),
        "norm.weight": (32,),
        "lm_head.weight": (20, 32),
        "d2t": (20,),
        "t2d": (VOCAB,),
    }
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert all(t.dtype == torch.bfloat16 for name, t in tensors.items() if name not in ("d2t", "t2d"))
    ids = torch.arange(20) + tensors["d2t"]
    assert ids.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()


def test_tensors_of_several_layers(tmp_path: Path) -> None:
    """Red when an engine finds no norm for a layer above the first: SGLang reads one name, vLLM the other."""
    draft = make_draft(num_layers=3)
    config = export(draft, tmp_path / "out")
    assert config["num_hidden_layers"] == 3
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    parts = {"hidden_norm", "input_layernorm", "post_attention_layernorm", *(f"self_attn.{x}_proj" for x in "qkvo"),
             "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}  # fmt: skip
    for layer, upper in enumerate(draft.decoder_layers[1:], start=1):
        assert {name for name in tensors if f"layers.{layer}." in name} == {f"layers.{layer}.{p}.weight" for p in parts}
        assert tensors[f"layers.{layer}.self_attn.q_proj.weight"].shape == (64, 32), "only the first layer reads 2D"
        for name in ("hidden_norm", "input_layernorm"):
            assert torch.equal(tensors[f"layers.{layer}.{name}.weight"], upper.hidden_norm.weight)


def test_a_whole_vocabulary_has_no_maps(tmp_path: Path) -> None:
    """Red when d2t is written for a draft whose ids are the target's: vLLM has no place for it and stops."""
    config = export(make_draft(vocab_size=VOCAB), tmp_path / "out")
    assert config["draft_vocab_size"] == config["vocab_size"] == VOCAB
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert not {"d2t", "t2d"} & tensors.keys()
    assert tensors["lm_head.weight"].shape == (VOCAB, 32)
    loaded = load_exported(tmp_path / "out", embedding=torch.zeros(VOCAB, 32))
    assert loaded.target_ids.tolist() == list(range(VOCAB))


@pytest.mark.parametrize("kept", ["hidden_norm", "input_layernorm"])
def test_either_name_of_a_norm_is_read(kept: str, tmp_path: Path) -> None:
    """Red when a folder that was written for one engine is refused, or the two names may contradict each other."""
    draft = make_draft(num_layers=2)
    export(draft, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    other = {"hidden_norm", "input_layernorm"} - {kept}
    dropped = tensors.pop(f"layers.1.{other.pop()}.weight")
    save_file(tensors, path)
    loaded = load_exported(tmp_path / "out", embedding=draft.embedding)
    assert torch.equal(loaded.decoder_layers[1].hidden_norm.weight, dropped)
    save_file({**tensors, "layers.1.hidden_norm.weight": dropped, "layers.1.input_layernorm.weight": dropped + 1}, path)
    with pytest.raises(InputError, match=r"layers\.1\.input_layernorm.* differ"):
        load_exported(tmp_path / "out", embedding=draft.embedding)


def test_config_says_everything_aloud(tmp_path: Path) -> None:
    """Red when a key is left to a reader's default: the readers' defaults differ."""
    config = export(make_draft(rope_parameters=YARN), tmp_path / "out", torch.bfloat16)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    for switch in ("norm_before_fc", "fc_norm", "norm_before_residual", "tie_word_embeddings"):
        assert config[switch] is False
    # SpecForge would leave out the norm before the head; engines take the same false where it is missing.
    assert "norm_output" not in config
    assert config["num_hidden_layers"] == 1
    assert config["vocab_size"] == VOCAB
    assert config["draft_vocab_size"] == 20
    assert config["target_hidden_size"] == config["hidden_size"] == 32
    assert config["max_position_embeddings"] == 256
    assert config["eagle_config"]["use_aux_hidden_state"] is True
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["eyas"]["target"] == "org/target"
    # Both spellings of the same rope.
    assert config["rope_theta"] == YARN["rope_theta"]
    assert config["rope_scaling"] == {key: value for key, value in YARN.items() if key != "rope_theta"}
    assert config["rope_parameters"] == YARN


def test_norms_of_a_variant_are_written_aloud(tmp_path: Path) -> None:
    """Red when serving and training disagree on a norm: readers default these keys differently."""
    config = export(make_draft(variant="eagle3.1"), tmp_path / "out", torch.bfloat16)
    assert (config["fc_norm"], config["norm_output"]) == (True, True)
    assert (config["norm_before_fc"], config["norm_before_residual"]) == (False, False)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name in tensors if name.startswith("fc_norm")} == {f"fc_norm.{part}.weight" for part in range(3)}
    assert all(tensors[f"fc_norm.{part}.weight"].shape == (32,) for part in range(3))


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e5}, YARN], ids=["default", "yarn"])
def test_transformers_reads_the_same_shape(rope: dict[str, Any], tmp_path: Path) -> None:
    """Red when the two spellings of the rope contradict each other, or a key has a name that LlamaConfig ignores."""
    export(make_draft(rope_parameters=rope), tmp_path / "out")
    config = LlamaConfig.from_pretrained(tmp_path / "out")
    assert {key: config.rope_parameters[key] for key in rope} == rope
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert config.rms_norm_eps == 1e-6
    assert config.dtype == torch.float32


def test_layer_ids_in_each_engines_meaning() -> None:
    """Red when either key is off by one: both must name the very states that the draft was trained on.

    `output_hidden_states[k]` of transformers is the state that enters layer k, the embedding's output at k = 0; the
    output of layer k is therefore entry k + 1. (The last entry is normed: no auxiliary layer here is the last.)
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=9,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    target = Target(model, None, name="tiny")
    config = serving_config(
        make_draft(aux_layer_ids=target.aux_layer_ids).config, layout="sglang", about=About("tiny"), dtype=torch.float32
    )
    token_ids = torch.arange(10)
    _, aux_hidden = target.forward(token_ids[None], DynamicCache())
    with torch.no_grad():
        entering = model(input_ids=token_ids[None], output_hidden_states=True).hidden_states
    vllm = [entering[k][0] for k in config["eagle_aux_hidden_state_layer_ids"]]
    sglang_ = [entering[k + 1][0] for k in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    assert torch.equal(torch.cat(vllm, -1), aux_hidden)
    assert torch.equal(torch.cat(sglang_, -1), aux_hidden)
    # vLLM sorts its ids and feeds the states in that order.
    assert config["eagle_aux_hidden_state_layer_ids"] == sorted(config["eagle_aux_hidden_state_layer_ids"])
    # The default of both engines for 9 layers, each in its own words.
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 9 // 2, 9 - 3]


def test_another_user_may_serve_it(tmp_path: Path) -> None:
    """Red when the weights are private to whoever trained: the server often runs as somebody else."""
    before = os.umask(0o022)
    try:
        export(make_draft(), tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()}
    assert modes == dict.fromkeys(("README.md", "config.json", "model.safetensors"), "0o644")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


def test_replaces_only_its_own(tmp_path: Path) -> None:
    """Red when someone's folder is written over, or an earlier export is left half old and half new."""
    draft = make_draft()
    export(draft, tmp_path / "out")
    draft.norm.weight.data.fill_(3.0)
    export(draft, tmp_path / "out")
    assert torch.equal(load_exported(tmp_path / "out", embedding=draft.embedding).norm.weight, draft.norm.weight)
    (tmp_path / "empty").mkdir()
    export(draft, tmp_path / "empty")

    (tmp_path / "out" / "notes.txt").write_text("mine")
    foreign = tmp_path / "model"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for folder, named in ((tmp_path / "out", "notes.txt"), (foreign, "config.json")):
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(InputError, match=named):
            export(draft, folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is not a folder"):
        export(draft, tmp_path / "file")
    with pytest.raises(InputError, match="cannot write an export"):
        export(draft, tmp_path / "file" / "below")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "model", "out"]


@pytest.mark.parametrize("fails", ["save_file", "sync_folder", "_put_in_place"])
def test_a_failed_export_leaves_nothing(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a folder appears before it is complete, or scratch is left behind; the earlier export must survive."""
    draft = make_draft()
    export(draft, tmp_path / "old")

    def fail(*arguments: object, **keywords: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, fails, fail)
    for name in ("old", "new"):
        with pytest.raises(OSError, match="No space"):
            export(draft, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    load_exported(tmp_path / "old", embedding=draft.embedding)


def test_a_failed_rename_brings_the_earlier_export_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the earlier export stays aside under another name although the new one did not arrive."""
    draft = make_draft()
    export(draft, tmp_path / "out")
    rule = Path.rename

    def rename(self: Path, to: Path) -> Path:
        if (self / "model.safetensors").exists() and to.name == "out" and not self.name.endswith("-old"):
            raise OSError(5, "Input/output error")
        return rule(self, to)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="Input/output"):
        export(draft, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    load_exported(tmp_path / "out", embedding=draft.embedding)


def _drop(name: str) -> Any:
    return lambda config, tensors: tensors.pop(name)


FAULTS: dict[str, tuple[Any, str]] = {
    "missing tensor": (_drop("midlayer.mlp.up_proj.weight"), "no tensor 'midlayer.mlp.up_proj.weight'"),
    "no weights at all": (lambda c, t: t.clear() or t.update(x=torch.ones(1)), "no tensor 'd2t'"),
    "unknown tensor": (lambda c, t: t.update({"fc_norm.0.weight": torch.ones(32)}), "fc_norm.0.weight"),
    "wrong shape": (lambda c, t: t.update({"norm.weight": torch.ones(31)}), r"norm.weight is \(31,\)"),
    "absolute d2t": (lambda c, t: t["d2t"].add_(torch.arange(20)), "does not mark exactly"),
    "d2t as floats": (lambda c, t: t.update({"d2t": t["d2t"].float()}), "d2t is torch.float32"),
    "t2d of other ids": (lambda c, t: t["t2d"].copy_(t["t2d"].roll(1)), "does not mark exactly"),
    "missing key": (lambda c, t: c.pop("head_dim"), "no key 'head_dim'"),
    "one layer id convention for both": (
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 3, 6]),
        "plus one each",
    ),
    "another variant": (lambda c, t: c.update(norm_output=True), "fc_norm=False, norm_output=True"),
    "a variant's norms are missing": (
        lambda c, t: c.update(fc_norm=True, norm_output=True),
        "no tensor 'fc_norm.0.weight'",
    ),
    "another architecture": (lambda c, t: c.update(architectures=["LlamaForCausalLM"]), "architectures is"),
    "a layer is missing": (lambda c, t: c.update(num_hidden_layers=2), "no tensor 'layers.1.hidden_norm.weight'"),
    "another vocabulary": (lambda c, t: c.update(vocab_size=VOCAB + 1), r"t2d is \(80,\), config.json asks for"),
    "facts of another form": (lambda c, t: c.update(eyas={"taus": [{"x": 1}]}), "its eyas facts"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name: str, tmp_path: Path) -> None:
    """Red when a damaged or foreign folder is loaded, or refused without saying what is wrong, in one line."""
    damage, message = FAULTS[name]
    draft = make_draft()
    folder = tmp_path / "out"
    config = export(draft, folder)
    tensors = load_file(folder / "model.safetensors")
    damage(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=message) as caught:
        load_exported(folder, embedding=draft.embedding)
    assert "\n" not in str(caught.value)


def test_another_target_is_refused(tmp_path: Path) -> None:
    """Red when a draft is put on a target of another width or vocabulary."""
    export(make_draft(), tmp_path / "out")
    for shape in ((VOCAB + 1, 32), (VOCAB, 33)):
        with pytest.raises(InputError, match=r"an embedding of.*give the target it was trained for"):
            load_exported(tmp_path / "out", embedding=torch.zeros(shape))


def test_missing_and_truncated_files_are_named(tmp_path: Path) -> None:
    """Red when a missing or cut file gives anything but one line with its name."""
    draft = make_draft()
    folder = tmp_path / "out"
    with pytest.raises(InputError, match=r"config\.json"):
        load_exported(folder, embedding=draft.embedding)
    export(draft, folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"model.safetensors: damaged"):
        load_exported(folder, embedding=draft.embedding)
    weights.unlink()
    with pytest.raises(InputError, match=r"no file .*model.safetensors"):
        load_exported(folder, embedding=draft.embedding)
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        load_exported(folder, embedding=draft.embedding)
