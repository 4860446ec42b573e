"""The schema that Prefect draws the run form from, and checks a form against: no browser here."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import validate

from flows.nightly import nightly_retrain
from flows.train_draft import train_draft
from tasks.trainer.config_states import modes
from tasks.trainer.errors import InputError
from tasks.trainer.recipe import config_from_form, load_config

FLOWS = [train_draft, nightly_retrain]
MINIMAL = {"target": {"model": "m"}, "data": {"source": "s"}}


def form(flow: Any) -> dict[str, Any]:
    return parameter_schema(flow).model_dump_for_openapi()


def full() -> dict[str, Any]:
    """Every parameter of train-draft at its default."""
    return load_config({**MINIMAL, "hidden_states": {"mode": "offline"}, "run_dir": "r"}).model_dump(mode="json")


@pytest.mark.parametrize("flow", FLOWS, ids=["train-draft", "nightly-retrain"])
def test_every_option_has_title_and_help(flow: Any) -> None:
    """Red when an option shows its Python name or no help, or Prefect lost a type on the way to the form."""
    schema = form(flow)
    Draft202012Validator.check_schema(schema)
    for group, definition in schema["definitions"].items():
        for name, field in definition["properties"].items():
            assert field.get("title", name) != name, f"{group}.{name}"
            assert len(field.get("description", "")) > 5, f"{group}.{name}"
    for name, field in schema["properties"].items():
        reference = field.get("$ref", field.get("allOf", [{}])[0].get("$ref", "")).rpartition("/")[2]
        assert field.get("description") or schema["definitions"][reference]["description"], name


def test_the_groups_stand_in_order() -> None:
    """Red when the form begins with another group than the target, or hides the modes at the end."""
    properties = form(train_draft)["properties"]
    order = sorted(properties, key=lambda name: properties[name]["position"])
    assert order[:5] == ["target", "hidden_states", "train", "data", "evaluate"]


def test_the_modes_are_tabs_with_the_store_first() -> None:
    """Red when Prefect would draw the modes as a JSON editor, or a mode's tab begins with anything but its store."""
    schema = form(train_draft)
    states = schema["properties"]["hidden_states"]
    assert "oneOf" not in states
    assert [entry["$ref"].rpartition("/")[2] for entry in states["anyOf"]] == ["Online", "Offline", "Auto"]
    for name in ("Online", "Offline", "Auto"):
        fields = schema["definitions"][name]["properties"]
        order = sorted(fields, key=lambda field: fields[field]["position"])
        assert order[0] == "store_url"
        assert order[-1] == "mode"
        assert fields["mode"]["enum"] == [name.lower()]
        assert fields["mode"]["default"] == name.lower()


@pytest.mark.parametrize(
    ("group", "key", "value", "limit"),
    [
        ("train", "steps", 0, "less than the minimum of 1"),
        ("hidden_states", "prefetch_gb", -1, "less than or equal to the minimum of 0"),
        ("hidden_states", "aux_step", -0.5, "less than the minimum of 0"),
        ("draft", "vocab_size", 3, "less than the minimum of 16"),
        ("data", "heldout_fraction", 1.0, "greater than or equal to the maximum of 1"),
    ],
)
def test_the_server_names_field_and_limit(group: str, key: str, value: float, limit: str) -> None:
    """Red when a value out of range is answered with "not valid under any of the given schemas"."""
    values = full()
    values[group][key] = value
    faults = validate(values, form(train_draft))
    assert [(fault.json_path, limit in fault.message) for fault in faults] == [(f"$.{group}.{key}", True)]


def test_null_is_no_number_out_of_range() -> None:
    """Red when the limits that stand beside the alternatives refuse an empty field."""
    values = full()
    assert not validate(values, form(train_draft))
    values["hidden_states"]["aux_step"] = None
    values["draft"]["vocab_size"] = None
    assert not validate(values, form(train_draft))


@pytest.mark.parametrize("mode", sorted(modes()))
def test_keys_of_the_tab_that_was_open_before_are_dropped(mode: str) -> None:
    """Red when a form filled correctly is refused for what another tab left in it, or a misspelt key passes."""
    left = {name: field.default for other in modes().values() for name, field in other.model_fields.items()}
    leaked = {**left, "mode": mode, "store_url": "runs/store"}
    values = {**MINIMAL, "hidden_states": leaked, "run_dir": "r"}
    assert config_from_form(values).hidden_states.mode == mode
    with pytest.raises(InputError, match=r"parameters: hidden_states: unknown key 'pre_set'; did you mean 'preset'"):
        config_from_form({**values, "hidden_states": {**leaked, "pre_set": "tiny"}})


def test_what_does_not_go_together_is_one_sentence() -> None:
    """Red when the state's message of a failed run is pydantic's."""
    values = full()
    values["train"] |= {"steps": 5, "warmup_steps": 100}
    with pytest.raises(InputError) as caught:
        config_from_form(values)
    said = str(caught.value)
    assert said.startswith("parameters: train: warmup_steps=100 is more than steps=5")
    assert "\n" not in said
    assert "pydantic" not in said
