"""The config schema and the recipe reader."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from storage.presets import PRESETS, Encoding
from tasks.trainer.config import HiddenStates, Online, RunConfig, identity_fields
from tasks.trainer.errors import InputError
from tasks.trainer.recipe import dump_config, load_config, read_config

BASE: dict[str, Any] = {"target": {"model": "folder"}, "data": {"source": "file.jsonl"}}


def refused(**changes: Any) -> str:
    with pytest.raises(InputError) as caught:
        load_config({**BASE, **changes})
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"train": {"stpes": 3}}, ["'train.stpes'", "did you mean 'steps'"]),
        ({"tarin": {}}, ["'tarin'", "did you mean 'train'"]),
        ({"hidden_states": {"mode": "offline", "store_ulr": "x"}}, ["'store_ulr'", "did you mean 'store_url'"]),
        ({"hidden_states": {"mode": "online", "on_missing": "refuse"}}, ["hidden_states.on_missing", "offline"]),
        ({"hidden_states": {"cache_dir": "x"}}, ["hidden_states.cache_dir", "offline"]),
        ({"hidden_states": {"preset": "tiny"}}, ["hidden_states.preset", "store_url"]),
        ({"hidden_states": {"store_budget_gb": 5}}, ["store_budget_gb=5.0", "store_url"]),
        ({"hidden_states": {"mode": "offline", "preset": "tiniest"}}, ["hidden_states.preset='tiniest'", "lossless"]),
        ({"hidden_states": {"mode": "offline", "aux_step": 99}}, ["preset=near", "aux_step 99", "0.00"]),
        ({"hidden_states": {"mode": "offline", "top_k": 8}}, ["top_k 8", "last=topk"]),
        ({"hidden_states": {"mode": "offline", "preset": "tiny", "last_step": 0.1}}, ["last_step 0.1", "last is topk"]),
        ({"hidden_states": {"mode": "offline", "codec": "zstd", "level": 99}}, ["level 99", "1 to 19"]),
        ({"hidden_states": {"mode": "offline", "codec": "lossless"}}, ["hidden_states.codec='lossless'", "blosc"]),
        ({"hidden_states": {"store_url": "x", "preset": "tiny"}, "train": {"loss": "torch"}}, ["loss=torch", "linear"]),
        ({"hidden_states": {"store_url": "x", "last": "topk"}, "train": {"temperature": 2.0}},
         ["temperature=2.0", "last=hidden"]),
        ({"hidden_states": {"mode": "offlien"}}, ["hidden_states", "offlien", "offline"]),
        ({"train": {"steps": 0}}, ["train.steps=0", "greater"]),
        ({"train": {"steps": "many"}}, ["train.steps='many'", "integer"]),
        ({"train": {"steps": 5, "warmup_steps": 6}}, ["warmup_steps=6", "steps=5"]),
        ({"train": {"nproc": 3, "context_parallel": 2}}, ["context_parallel=2", "3 ranks"]),
        (
            {"train": {"context_parallel": 2}, "hidden_states": {"mode": "online", "store_url": "x"}},
            ["context_parallel=2", "store_url", "mode=offline"],
        ),
        ({"train": {"schedule": "wsd"}}, ["train.schedule='wsd'", "warmup_stable_decay"]),
        ({"train": {"decay_steps": 9}}, ["decay_steps=9", "schedule=warmup_stable_decay", "schedule=cosine;"]),
        ({"train": {"schedule": "linear", "min_learning_rate_ratio": 0.0}}, ["ratio=0.0", "cosine_with_min_lr and"]),
        ({"train": {"schedule": "warmup_stable_decay", "steps": 200, "decay_steps": 101}}, ["101 steps", "steps=200"]),
        ({"train": {"muon_momentum": 0.9}}, ["muon_momentum=0.9", "optimizer=muon"]),
        ({"train": {"attention": "flex", "device": "cpu"}}, ["flex", "fused"]),
        ({"train": {"attention": "flash"}}, ["train.attention='flash'", "fused"]),
        ({"train": {"objective": "lk_alpha", "temperature": 2.0}}, ["temperature=2.0", "use temperature=1"]),
        ({"train": {"objective": "kl"}}, ["train.objective='kl'", "soft_cross_entropy"]),
        ({"train": {"checkpointing": "layer"}}, ["train.checkpointing='layer'", "step"]),
        ({"data": {"source": "x", "heldout_fraction": 0.0}}, ["heldout_fraction", "heldout_source"]),
        ({"draft": {"variant": "eagle3.1", "start": "target_layer"}}, ["variant=eagle3", "start=random"]),
        ({"draft": {"variant": "eagle4"}}, ["draft.variant='eagle4'", "eagle3.1"]),
        ({"data": {}}, ["data.source is missing"]),
        ({"hidden_states": {"mode": "offline", "shard_tokens": 1000}}, ["shard_tokens=1000", "use 1024"]),
    ],
)  # fmt: skip
def test_faults_name_the_key_and_the_way_out(changes: dict[str, Any], parts: list[str]) -> None:
    """Red when an unknown key or an impossible combination is accepted, or the message lacks key or way out."""
    message = refused(**changes)
    for part in parts:
        assert part in message


def test_form_values_with_leaked_sibling_keys_pass_but_typos_do_not() -> None:
    """Red when the form's leaked keys of the other tab refuse a run, or a misspelt key is swallowed. What both tabs
    have is shown on both, and kept."""
    leaked = {"mode": "online", "on_missing": "refuse", "cache_gb": 3, "preset": "small"}
    config = RunConfig.model_validate({**BASE, "hidden_states": leaked})
    assert config.hidden_states == Online(preset="small")
    with pytest.raises(ValueError, match="did you mean 'store_url'"):
        RunConfig.model_validate({**BASE, "hidden_states": {"mode": "offline", "store_urll": "x"}})


def test_union_members_have_no_additional_properties_rule_and_default_modes() -> None:
    """Red when the form would refuse leaked keys by itself, or a mode has no default equal to its literal."""
    definitions = RunConfig.model_json_schema()["$defs"]
    for mode in ("Online", "Offline", "Auto"):
        assert "additionalProperties" not in definitions[mode]
        assert definitions[mode]["properties"]["mode"]["default"] == mode.lower()
        assert definitions[mode]["properties"]["mode"]["enum"] == [mode.lower()]
    assert HiddenStates is not None


def leaves(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for group, reference in schema["properties"].items():
        names = [reference.get("$ref"), *(entry["$ref"] for entry in reference.get("oneOf", []))]
        definitions = [schema["$defs"][name.rsplit("/", 1)[1]] for name in names if name]
        found += [(f"{group}.{key}", field) for each in definitions for key, field in each["properties"].items()]
    return found


def test_every_option_is_documented_and_reachable_by_set(tmp_path: Path) -> None:
    """Red when an option has no title, or `--set` cannot give it its default."""
    recipe = tmp_path / "recipe.yaml"
    for key, field in leaves(RunConfig.model_json_schema()):
        assert field.get("title"), key
        name = key.split(".")[1]
        of_states = key.startswith("hidden_states.")
        offline = of_states and (
            name not in Online.model_fields or Online.model_fields[name].default != field["default"]
        )
        values = {**BASE, "hidden_states": {"mode": "offline" if offline else "online"}}
        recipe.write_text(yaml.safe_dump(values))
        if key in ("target.model", "data.source"):
            continue
        if key == "hidden_states.mode":
            continue
        config = read_config(str(recipe), [f"{key}={yaml.safe_dump(field['default'], default_flow_style=True)}"])
        assert config == load_config(values), key


def test_dump_reads_back_equal(tmp_path: Path) -> None:
    """Red when a resolved config.yaml does not give the same config again."""
    config = load_config(
        {
            **BASE,
            "hidden_states": {"mode": "offline", "codec": "raw", "aux_step": 0.0},
            "train": {"learning_rate": 3e-4},
        }
    )
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert read_config(str(path)) == config


def test_overrides(tmp_path: Path) -> None:
    """Red when --set loses to the file, 1e-4 stays a string, or changing the mode keeps the other mode's keys."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**BASE, "hidden_states": {"mode": "offline", "store_url": "s3"}}))
    config = read_config(
        str(path), ["train.learning_rate=1e-4", "hidden_states.mode=online", "draft.vocab_size=null"], run_dir="there"
    )
    assert config.train.learning_rate == 1e-4
    assert config.hidden_states == Online()
    assert config.draft.vocab_size is None
    assert config.run_dir == "there"
    for wrong in ("train.steps", "=3", "run_dir.deeper=3", "train.steps=[1"):
        with pytest.raises(InputError, match="--set"):
            read_config(str(path), [wrong], run_dir="there") if wrong != "run_dir.deeper=3" else read_config(
                str(path), ["run_dir=x", wrong]
            )


@pytest.mark.parametrize("text", ["- a list", "a: [", "", "just text"])
def test_files_that_are_no_recipe(text: str, tmp_path: Path) -> None:
    """Red when a broken recipe gives a traceback instead of its name."""
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"recipe\.yaml"):
        read_config(str(path))
    with pytest.raises(InputError, match=r"absent\.yaml"):
        read_config(str(tmp_path / "absent.yaml"))


def test_identity_ignores_what_does_not_change_the_draft() -> None:
    """Red when another store, checkpoint cadence or evaluation makes another run, or another seed does not."""
    first = load_config({**BASE, "hidden_states": {"mode": "offline", "store_url": "a"}})
    second = load_config(
        {
            **BASE,
            "hidden_states": {
                "mode": "offline",
                "store_url": "b",
                "codec": "raw",
                "chunk_tokens": 256,
                "cache_dir": "c",
                "aux_step": 0.1,
                "on_missing": "refuse",
                "prefetch_gb": 2.0,
            },
            "train": {"checkpoint_every": 7},
            "evaluate": {"num_prompts": 3},
            "run_dir": "elsewhere",
        }
    )
    assert identity_fields(first) == identity_fields(second)
    assert identity_fields(first) != identity_fields(load_config({**BASE, "train": {"seed": 1}}))


def test_identity_knows_what_a_store_loses() -> None:
    """Red when a run continues on other numbers than it began on, or a lossless store makes online training another
    run."""

    def identity(**states: Any) -> Any:
        return identity_fields(load_config({**BASE, "hidden_states": states}))

    offline = {"mode": "offline"}
    different = [
        identity(),
        identity(**offline),
        identity(**offline, preset="lossless"),
        identity(**offline, preset="compact"),
        identity(**offline, aux_step=0.2),
        identity(**offline, last="topk"),
        identity(**offline, last="topk", top_k=64),
        identity(store_url="x"),
    ]
    assert all(a != b for a, b in itertools.combinations(different, 2))
    assert (
        identity(store_url="x", preset="lossless") == identity(store_url="y", aux_step=0.0, last_step=0.0) == identity()
    )
    by_hand = {"aux_step": 0.3, "last_step": 0.1}
    assert identity(**offline, preset="compact") == identity(**offline, **by_hand)


@pytest.mark.parametrize("mode", [{"mode": "offline"}, {"mode": "online", "store_url": "x"}])
def test_presets_and_their_parts(mode: dict[str, Any]) -> None:
    """Red when a part set by hand does not win over the preset, or changing the form of the target keeps the other
    form's numbers."""

    def encoding(**states: Any) -> Encoding:
        return load_config({**BASE, "hidden_states": {**mode, **states}}).hidden_states.encoding()

    assert encoding() == PRESETS["near"]
    for name, preset in PRESETS.items():
        assert encoding(preset=name) == preset
    assert encoding(preset="compact", last="topk") == Encoding(aux_step=0.3, last="topk", top_k=256)
    assert encoding(preset="tiny", top_k=8).top_k == 8
    hidden = encoding(preset="tiny", last="hidden")
    assert (hidden.last_step, hidden.top_k, hidden.codec) == (0.05, None, "zstd")
    assert encoding(aux_step=0.0, last_step=0.0).lossless
    assert encoding(codec="raw").level == 0
    assert (encoding(codec="blosc", level=6).codec, encoding(codec="blosc", level=6).level) == ("blosc", 6)
