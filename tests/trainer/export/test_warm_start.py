"""Starting from an earlier draft: what is copied, what is mapped, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.errors import InputError
from tasks.trainer.export.about import About
from tasks.trainer.export.folder import export_draft
from tasks.trainer.export.warm_start import start_from_parent
from tasks.trainer.files import digest
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import run_stage
from tasks.trainer.train.curves import read_metrics
from tests.trainer.drafts import DRAFT_VOCAB, TARGET_VOCAB, draft_config, random_draft, vocabulary_maps


def fresh(seed: int = 7, **changes: Any) -> Eagle3Draft:
    """A fresh draft with a draft vocabulary of its own."""
    config = draft_config(**changes)
    generator = torch.Generator().manual_seed(seed)
    embedding, head = (torch.rand(TARGET_VOCAB, 32, generator=generator) for _ in range(2))
    maps = vocabulary_maps(config, generator)
    return Eagle3Draft.initialise(config, embedding=embedding, head=head, **maps, seed=seed)


def write_checkpoint(draft: Eagle3Draft, folder: Path) -> Path:
    """A checkpoint's parts that a parent has, as train/checkpoint.py writes them."""
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in draft.state_dict().items()}, folder / "draft.safetensors")
    state = {"shape": asdict(draft.config), "digests": {"draft.safetensors": digest(folder / "draft.safetensors")}}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def write_export(draft: Eagle3Draft, folder: Path, layout: str = "sglang") -> Path:
    export_draft(draft, folder, about=About("t"), dtype=torch.float32, layout=layout)
    return folder


def write_specforge(draft: Eagle3Draft, folder: Path) -> Path:
    """As SpecForge writes it: fewer keys, a bool t2d and int64 d2t always, the target's embedding, tables, shards."""
    export_draft(draft, folder, about=About("t"), dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    kept = ("architectures", "model_type", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "num_hidden_layers", "vocab_size", "draft_vocab_size", "rms_norm_eps", "rope_theta",
            "rope_scaling", "fc_norm", "norm_output")  # fmt: skip
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in kept if key in config}))
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: draft.state_dict()[name] for name in ("d2t", "t2d")}
    (folder / "model.safetensors").unlink()
    other = {"embed_tokens.weight": draft.embedding, "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    other["lm_head.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model-00001-of-00002.safetensors")
    save_file(other, folder / "model-00002-of-00002.safetensors")
    return folder


WRITERS: dict[str, Callable[[Eagle3Draft, Path], Path]] = {
    "checkpoint": write_checkpoint,
    "export": write_export,
    "vllm": partial(write_export, layout="vllm"),
    "speculators": partial(write_export, layout="speculators"),
    "SpecForge": write_specforge,
}


@pytest.mark.parametrize(
    "shape", [{}, {"num_layers": 2}, {"vocab_size": TARGET_VOCAB}, {"variant": "eagle3.1"}], ids=str
)
@pytest.mark.parametrize("layout", WRITERS)
def test_layers_are_copied_and_the_head_goes_by_target_id(layout: str, shape: dict[str, Any], tmp_path: Path) -> None:
    """Red when a weight is not the parent's, a head row lands at another token, or a new token's row is not the
    target's."""
    parent = random_draft(torch.float32, **shape)
    init = WRITERS[layout](parent, tmp_path / "parent")
    draft = fresh(**shape)
    before = draft.lm_head.weight.detach().clone()
    kept = start_from_parent(draft, str(init))
    of_head = {"lm_head.weight", "d2t", "t2d"}
    for name, tensor in parent.state_dict().items():
        assert name in of_head or torch.equal(draft.state_dict()[name], tensor), name
    theirs = {int(token): row for token, row in zip(parent.target_ids, parent.lm_head.weight, strict=True)}
    for number, token in enumerate(draft.target_ids.tolist()):
        assert torch.equal(draft.lm_head.weight[number], theirs.get(token, before[number])), token
    assert kept == len(set(draft.target_ids.tolist()) & theirs.keys())
    assert shape == {"vocab_size": TARGET_VOCAB} or 0 < kept < DRAFT_VOCAB, "the two vocabularies must overlap"


def test_what_a_folder_leaves_out_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Red when a guess that would train something else is made in silence."""
    init = write_specforge(random_draft(torch.float32, rope_parameters={"rope_theta": 5e5}), tmp_path / "parent")
    with caplog.at_level(logging.INFO):
        start_from_parent(fresh(), str(init))
    unsaid = "norm_before_fc, norm_output, norm_before_residual"
    for part in (unsaid, "auxiliary layers", "rope_parameters", "head rows"):
        assert part in caplog.text


def _edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config.update(changes)
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))

    return edit


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _speculators(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        write_export(random_draft(torch.float32), folder, "speculators")
        _edit_config(**changes)(folder)

    return edit


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "layers of another kind": (_speculators(transformer_layer_config={"model_type": "qwen3"}), "model_type 'qwen3'"),
    "a trained embedding": (_speculators(embed_requires_grad=True), "its embedding was trained"),
    "a norm that readers guess apart": (_speculators(norm_before_residual="gone"), "vLLM takes as true"),
    "normed residual": (_speculators(norm_before_residual=True), "norm_before_residual=True: Eyas has no"),
    "another algorithm": (_speculators(speculators_model_type="dflash"), "speculators_model_type is 'dflash'"),
    "four layers": (_speculators(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]), "4 auxiliary layers"),
    "no hidden size": (_edit_config(hidden_size="gone"), "no hidden_size"),
    "normed output": (_edit_config(norm_output=True), "norm_output=True"),
    "normed layers": (_edit_config(fc_norm=True), "fc_norm=True"),
    "another architecture": (_edit_config(architectures=["LlamaForCausalLM"]), "architectures is"),
    "layer ids at odds": (_edit_config(eagle_aux_hidden_state_layer_ids=[5, 6, 7]), "plus one each"),
    "another width": (_edit_config(intermediate_size=41), "config.json asks for"),
    "cut": (_cut, "model.safetensors is damaged"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_damaged_and_foreign_folders(name: str, tmp_path: Path) -> None:
    """Red when such a parent is taken, or refused without a word on what is wrong."""
    damage, message = FAULTS[name]
    init = write_export(random_draft(torch.float32), tmp_path / "parent")
    damage(init)
    with pytest.raises(InputError, match=message) as caught:
        start_from_parent(fresh(), str(init))
    assert "\n" not in str(caught.value)


def test_other_sizes_name_the_settings(tmp_path: Path) -> None:
    """Red when a parent of other sizes is copied as far as it goes, or the message lacks what to set."""
    parent = random_draft(torch.float32, num_layers=2, intermediate_size=48, aux_layer_ids=(0, 2, 3))
    init = str(write_checkpoint(parent, tmp_path / "parent"))
    settings = r"set draft\.num_layers=2, draft\.intermediate_size=48, target\.aux_layer_ids=\[0, 2, 3\]"
    with pytest.raises(InputError, match=rf"num_layers 2 instead of 1.*{settings}"):
        start_from_parent(fresh(), init)
    start_from_parent(fresh(num_layers=2, intermediate_size=48, aux_layer_ids=(0, 2, 3)), init)
    with pytest.raises(InputError, match=r"variant eagle3 instead of eagle3\.1: set draft\.variant=eagle3"):
        start_from_parent(fresh(variant="eagle3.1", num_layers=2, intermediate_size=48, aux_layer_ids=(0, 2, 3)), init)
    with pytest.raises(InputError, match="target with target_vocab_size 80, this run's has 90"):
        start_from_parent(
            Eagle3Draft(
                draft_config(target_vocab_size=90),
                embedding=torch.zeros(90, 32),
                d2t=torch.zeros(DRAFT_VOCAB),
                t2d=torch.zeros(90),
            ),
            init,
        )


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    """Red when a checkpoint whose bytes are not those that were saved is trained on."""
    init = write_checkpoint(random_draft(torch.float32), tmp_path / "parent")
    tensors = load_file(init / "draft.safetensors")
    tensors["norm.weight"] += 1
    save_file(tensors, init / "draft.safetensors")
    with pytest.raises(InputError, match=r"damaged: draft\.safetensors is not what was saved"):
        start_from_parent(fresh(), str(init))


def test_a_run_goes_on_from_another_runs_checkpoint(recipe_values: Callable[..., dict[str, Any]]) -> None:
    """Red when draft.init does not reach training, or real checkpoints and exports are not what is read."""

    def run(name: str, stages: tuple[str, ...], **draft: Any) -> RunDir:
        train = {"steps": 40, "learning_rate": 1e-2, "checkpoint_every": 40}
        config = load_config(recipe_values(name, draft={"vocab_size": 150, **draft}, train=train))
        made = RunDir.create(config)
        for stage in stages:
            run_stage(stage, made, silent)
        return made

    parent = run("parent", ("prepare", "train", "export"))
    losses = [line["loss"] for line in read_metrics(parent.metrics)]
    for name, init in (("a", parent.checkpoints / "step-000040"), ("b", parent.draft)):
        child = run(name, ("prepare", "train", "evaluate", "export", "report"), init=str(init), vocab_size=160)
        receipt = child.receipt("train")
        assert receipt is not None
        assert receipt["head_rows_of_parent"] == 150, "the frequent tokens of the same data are among the child's"
        first = read_metrics(child.metrics)[0]["loss"]
        assert f"`{init}`; 150 of 160 head rows" in child.report_markdown.read_text()
        assert first < (losses[0] + 2 * losses[-1]) / 3, "the child starts where the parent stopped"
