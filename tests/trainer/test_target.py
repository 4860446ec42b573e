"""The target: what is captured is what transformers computes, and wrong models are refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kernels.ttt_attention import ttt_attention
from tasks.trainer.config import Draft
from tasks.trainer.config import Target as TargetChoice
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.draft.shape import draft_shape, fresh_draft
from tasks.trainer.errors import InputError
from tasks.trainer.target import Document, Target
from tasks.trainer.target_ends import load_ends
from tasks.trainer.target_files import resolve
from tasks.trainer.target_text import load_text
from tests.conftest import write_target

IDS = torch.arange(40) * 7 % 300


def choose(folder: str) -> TargetChoice:
    return TargetChoice(model=folder, dtype="bfloat16")


def load(folder: Path, **changes: object) -> Target:
    return Target.load(str(folder), **{"dtype": "bfloat16", **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [False, True])
def test_capture_equals_transformers(tied: bool, tmp_path: Path) -> None:
    """Red when a hook sits on the wrong layer (off by one), the last state lacks the final norm, or argmax/lse are not
    those of the full vocabulary."""
    target = load(write_target(tmp_path, tied=tied))
    rows = torch.tensor([0, 3, 4, len(IDS) - 1])
    [states] = target.capture([Document(IDS, rows, "x")])
    with torch.no_grad():
        output = target.model(IDS[None], output_hidden_states=True)
    expected = torch.cat([output.hidden_states[layer + 1][0] for layer in target.aux_layer_ids], -1)
    assert target.aux_layer_ids == (1, 3, 4)
    assert torch.equal(states.aux_hidden, expected)
    assert states.last_hidden is not None
    assert torch.equal(states.last_hidden, output.hidden_states[-1][0, rows])
    logits = output.logits[0, rows].float()
    assert torch.equal(states.target_argmax.long(), logits.argmax(-1))
    torch.testing.assert_close(states.target_lse, logits.logsumexp(-1))
    assert {states.aux_hidden.dtype, states.last_hidden.dtype} == {torch.bfloat16}
    assert states.target_argmax.dtype == torch.int32


def test_top_tokens_are_the_most_probable(target_folder: Path) -> None:
    """Red when log-probabilities are over the k tokens alone, ids are not of the full vocabulary, or the last hidden
    state travels beside them."""
    target = load(target_folder)
    rows = torch.tensor([2, 5, 7])
    [states] = target.capture([Document(IDS, rows, "x")], top_k=20)
    with torch.no_grad():
        logits = target.model(IDS[None]).logits[0, rows].float()
    assert states.last_hidden is None
    assert states.top_k is not None
    assert (states.top_k.ids.dtype, states.top_k.ids.shape) == (torch.int32, (3, 20))
    expected = logits.log_softmax(-1).gather(1, states.top_k.ids.long())
    torch.testing.assert_close(states.top_k.log_probabilities, expected)
    assert torch.equal(states.top_k.ids[:, 0], states.target_argmax)
    others = logits.scatter(1, states.top_k.ids.long(), float("-inf"))
    assert bool((others.max(-1).values <= logits.gather(1, states.top_k.ids.long()).min(-1).values).all())
    [none] = target.capture([Document(IDS, torch.arange(0), "x")], top_k=20)
    assert none.top_k is not None
    assert none.top_k.ids.shape == (0, 20)


ARCHITECTURES: dict[str, dict[str, object]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma3_text": {"head_dim": 8},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": 8, "n_head": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8, "max_position_embeddings": 131072},
}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_capture_of_other_families(family: str) -> None:
    """Red when a family's layers, final norm or head are not found where they are, or its draft has no shape."""
    sizes = {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1,
        "pad_token_id": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**sizes, **ARCHITECTURES[family]})
    target = Target(AutoModelForCausalLM.from_config(config).to(torch.bfloat16), None, name=family)
    [states] = target.capture([Document(IDS, torch.arange(len(IDS)), "x")])
    with torch.no_grad():
        output = target.model(IDS[None], output_hidden_states=True)
    assert torch.equal(states.aux_hidden, torch.cat([output.hidden_states[layer + 1][0] for layer in (1, 3, 4)], -1))
    assert states.last_hidden is not None
    assert torch.equal(states.last_hidden, output.hidden_states[-1][0])
    assert torch.equal(states.target_argmax.long(), output.logits[0].float().argmax(-1))
    shape = draft_shape(target.config, Draft(), vocab_size=100, target_vocab_size=300, aux_layer_ids=(1, 3, 4))
    Eagle3Draft(
        shape,
        embedding=target.embedding,
        d2t=torch.zeros(100, dtype=torch.int64),
        t2d=torch.arange(300) < 100,
    )


def test_cached_decoding_equals_one_forward(target_folder: Path) -> None:
    """Red when positions or the auxiliary states of the second call do not continue the first."""
    target = load(target_folder, compute_dtype="float32")
    cache = DynamicCache(config=target.config)
    parts = [target.forward(IDS[None, :25], cache), target.forward(IDS[None, 25:], cache)]
    logits, aux_hidden = target.forward(IDS[None], DynamicCache(config=target.config))
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), aux_hidden, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_ends_alone_equal_the_models(tied: bool, shard_size: str, tmp_path: Path) -> None:
    """Red when embedding or head are read wrongly from single or sharded, tied or untied checkpoints."""
    folder = write_target(tmp_path / "one", tied=tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    shutil.copytree(folder, tmp_path / "two")
    for old in (tmp_path / "two").glob("*.safetensors"):
        old.unlink()
    model.save_pretrained(tmp_path / "two", max_shard_size=shard_size)
    assert (len(list((tmp_path / "two").glob("*.safetensors"))) > 1) == (shard_size == "20KB")
    ends = load_ends(choose(str(tmp_path / "two")), device="cpu")
    target = load(tmp_path / "two")
    assert torch.equal(ends.embedding, target.embedding)
    assert torch.equal(ends.head, target.head)


def fingerprint(folder: Path, **changes: object) -> str:
    options = {"dtype": "bfloat16", "aux_layer_ids": None, "chat_template": None, "revision": None, "device": "cpu"}
    return load_text(str(folder), **{**options, **changes}).fingerprint  # type: ignore[arg-type]


def test_fingerprint_changes_with_whatever_changes_the_states(target_folder: Path, tmp_path: Path) -> None:
    """Red when states of other weights, layers, template or dtype could be taken for this target's."""
    template = tmp_path / "other.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    moved = tmp_path / "moved"
    shutil.copytree(target_folder, moved)
    assert fingerprint(moved) == fingerprint(target_folder), "the same model elsewhere is the same target"
    others = {
        fingerprint(target_folder),
        fingerprint(target_folder, aux_layer_ids=(0, 1, 2)),
        fingerprint(target_folder, dtype="float32"),
        fingerprint(target_folder, chat_template=str(template)),
        fingerprint(write_target(tmp_path / "seed", seed=1)),
    }
    assert len(others) == 5


def test_the_head_gets_contiguous_rows(target_folder: Path) -> None:
    """Red when a batched prefill hands the head a strided view: on the CPU torch then copies it once a row."""
    target = load(target_folder)
    seen: list[bool] = []
    head = target.model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].is_contiguous()))
    target.model(IDS.reshape(2, 20), logits_to_keep=1)
    assert seen == [True]


def test_nan_is_refused_with_the_samples_id(target_folder: Path) -> None:
    """Red when NaN states reach a store or the draft."""
    target = load(target_folder)
    torch.nn.init.constant_(target.model.model.layers[3].mlp.down_proj.weight, float("nan"))
    with pytest.raises(InputError, match=r"sample 0123: .*NaN"):
        target.capture([Document(IDS, torch.tensor([2]), "0123")])


def test_too_few_layers(tmp_path: Path) -> None:
    """Red when three auxiliary layers are made up, or fewer than three pass."""
    small = write_target(tmp_path, num_layers=4)
    with pytest.raises(InputError, match=r"4 layers.*target\.aux_layer_ids"):
        load(small)
    assert load(small, aux_layer_ids=(0, 1, 3)).aux_layer_ids == (0, 1, 3)
    for wrong in ((0, 1, 4), (1, 0, 2), (0, 0, 1), (0, 1)):
        with pytest.raises(InputError, match="three different ascending layers from 0 to 3"):
            load(small, aux_layer_ids=wrong)


def test_no_chat_template(tmp_path: Path) -> None:
    """Red when a base model is rendered with an invented template."""
    folder = write_target(tmp_path, template=None)
    with pytest.raises(InputError, match=r"no chat template; set target\.chat_template"):
        load(folder)
    with pytest.raises(InputError, match=r"absent\.jinja"):
        load(folder, chat_template=str(tmp_path / "absent.jinja"))


def test_models_that_are_none(tmp_path: Path, target_folder: Path) -> None:
    """Red when a wrong path or pickled weights give a traceback, or are loaded."""
    for name, reason in {
        str(tmp_path / "absent"): "no such file or folder",
        "package://no_such_package_here/x.gguf": "not installed",
        str(tmp_path): r"no config\.json",
        str(target_folder / "config.json"): r"not a \.gguf",
    }.items():
        with pytest.raises(InputError, match=reason):
            resolve(name)
    shutil.copy(target_folder / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(InputError, match=r"unpickles no \.bin"):
        resolve(str(tmp_path))


def test_softcapped_logits_are_refused(tmp_path: Path) -> None:
    """Red when a target whose logits are not head(last_hidden) would give wrong soft targets in silence."""
    folder = write_target(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 30.0}))
    with pytest.raises(InputError, match="final_logit_softcapping=30"):
        load(folder)


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_a_draft_starts_as_the_targets_last_layer(shard_size: str, tmp_path: Path) -> None:
    """Red when another layer is read, or a weight lands elsewhere: with the embedding's half of q, k, v at zero the
    draft on the input of the last layer must give the target's logits. RoPE, norms and head included."""
    folder = write_target(tmp_path / "one")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size=shard_size)
    for whole in (folder / "model.safetensors",) if shard_size == "20KB" else ():
        whole.unlink()
    ends = load_ends(choose(str(folder)), device="cpu", with_last_layer=True)
    target = load(folder, compute_dtype="float32", aux_layer_ids=(1, 3, 6))
    shape = draft_shape(target.config, Draft(), vocab_size=300, target_vocab_size=300, aux_layer_ids=(1, 3, 6))
    maps = {"d2t": torch.zeros(300, dtype=torch.int64), "t2d": torch.ones(300, dtype=torch.bool)}
    draft, _ = fresh_draft(shape, Draft(start="target_layer"), ends, **maps, seed=0)
    for projection in ("q_proj", "k_proj", "v_proj"):
        getattr(draft.midlayer.self_attn, projection).weight.data[:, :32] = 0
    logits, aux_hidden = target.forward(IDS[None], DynamicCache(config=target.config))
    with torch.no_grad():
        hidden = draft.fuse(aux_hidden)
        query, key, value = draft.qkv(draft.embed(IDS), hidden, torch.arange(40))
        attended = ttt_attention(query, key, value, document_lengths=[40], backend="eager")
        _, read_by_head = draft.outputs(draft.finish(attended, hidden))
        torch.testing.assert_close(draft.lm_head(read_by_head), logits, atol=1e-4, rtol=1e-4)


def test_a_start_that_does_not_fit(tmp_path: Path) -> None:
    """Red when a draft of other sizes, or of a target with other layers, starts from something else in silence."""
    folder = str(write_target(tmp_path / "a"))
    ends = load_ends(choose(folder), device="cpu", with_last_layer=True)
    chosen = Draft(start="target_layer", intermediate_size=64)
    shape = draft_shape(ends.config, chosen, vocab_size=300, target_vocab_size=300, aux_layer_ids=(1, 3, 4))
    maps = {"d2t": torch.zeros(300, dtype=torch.int64), "t2d": torch.ones(300, dtype=torch.bool)}
    with pytest.raises(InputError, match=r"draft\.start=target_layer: mlp\.gate_proj.*draft\.start=random"):
        fresh_draft(shape, chosen, ends, **maps, seed=0)
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", vocab_size=300, n_embd=32, n_layer=8, n_head=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(InputError, match=r"gpt2.*draft\.start=random"):
        load_ends(choose(str(tmp_path / "gpt2")), device="cpu", with_last_layer=True)


def family_target(family: str, **changes: object) -> Target:
    """A small random model of transformers in float32, its documents packed."""
    sizes = {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1,
        "pad_token_id": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**sizes, **ARCHITECTURES.get(family, {}), **changes})
    return Target(AutoModelForCausalLM.from_config(config), None, name=family, pack_documents=True)


# gpt2 has absolute positions: turned ones (RoPE) do not show that a document begins elsewhere.
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "gpt_neox", "gpt2"])
def test_documents_that_share_a_forward_are_as_alone(family: str) -> None:
    """Red when a document sees another one, its positions do not start at 0, or its rows come back as another's."""
    target = family_target(family, sliding_window=None)
    assert target.packs
    documents = [
        Document(IDS[:17], torch.tensor([3, 9]), "a"),
        Document(IDS[5:6], torch.arange(0), "b"),
        Document(IDS.flip(0), torch.tensor([0, 38]), "c"),
    ]
    for top_k in (None, 5):
        together = target.capture(documents, top_k=top_k)
        for document, states in zip(documents, together, strict=True):
            [alone] = target.capture([document], top_k=top_k)
            # Stored in bfloat16: a unit in the last place of values below 4.
            torch.testing.assert_close(states.aux_hidden, alone.aux_hidden, atol=2**-6, rtol=2**-7)
            torch.testing.assert_close(states.target_lse, alone.target_lse, atol=2e-2, rtol=0)
            assert len(states.target_argmax) == len(document.target_rows)
            if top_k is None:
                torch.testing.assert_close(states.last_hidden, alone.last_hidden, atol=2**-6, rtol=2**-7)
            else:
                assert states.top_k is not None
                assert alone.top_k is not None
                torch.testing.assert_close(
                    states.top_k.log_probabilities, alone.top_k.log_probabilities, atol=2e-2, rtol=0
                )


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("mistral", {"sliding_window": 8}, "its attention takes sliding_window"),
        ("gpt_oss", {}, "its attention takes s_aux"),
        ("mamba", {"state_size": 8}, "with what lies before it"),
        ("falcon_h1", {}, "with what lies before it"),
    ],
)
def test_models_that_do_not_keep_documents_apart(
    family: str, changes: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when windows, sinks or recurrent layers are taken for plain attention, or nobody is told."""
    target = family_target(family, **changes)
    assert not target.packs
    assert f"target {family}: one document a forward, for " in caplog.text
    assert reason in caplog.text


def test_who_packs(target_folder: Path) -> None:
    """Red when a CPU packs by itself, or a config's choice is not followed."""

    def packs(choice: str, **options: bool) -> bool:
        chosen = TargetChoice(model=str(target_folder), pack_documents=choice)  # type: ignore[arg-type]
        return Target.of(chosen, device="cpu", **options).packs

    assert not packs("auto")
    assert packs("always", deterministic=True)


def test_a_document_with_nan_is_named_among_others(target_folder: Path) -> None:
    """Red when the error names another document of the forward."""
    target = load(target_folder, pack_documents=True)
    with torch.no_grad():
        target.embedding[299] = float("nan")
    with pytest.raises(InputError, match=r"sample 0123: the target's auxiliary hidden states hold NaN"):
        target.capture([
            Document(IDS[:5] * 0 + 7, torch.tensor([2]), "before"),
            Document(IDS[:5] * 0 + 299, torch.tensor([2]), "0123"),
        ])  # fmt: skip
