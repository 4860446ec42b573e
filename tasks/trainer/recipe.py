"""The strict door to the config: YAML recipes, `--set key=value`, and errors that read like sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from tasks.trainer.config import RunConfig, placed
from tasks.trainer.config_states import modes, nearest
from tasks.trainer.errors import InputError


def load_config(values: Mapping[str, Any], *, where: str = "config") -> RunConfig:
    """Validate a whole config strictly.

    Raises InputError: one line for each fault, naming the dotted key, the value and the nearest right name. Unlike
    the form, a file may not carry keys of the hidden-state mode that was not chosen.
    """
    if not isinstance(values, Mapping):
        raise InputError(f"{where}: expected a mapping of groups (target, data, ...), got {type(values).__name__}")
    states = values.get("hidden_states")
    if isinstance(states, Mapping):
        mode = modes().get(str(states.get("mode", "online")))
        for key in states if mode else ():
            other = [name for name, sibling in modes().items() if key in sibling.model_fields]
            if mode and key not in mode.model_fields and other:
                raise InputError(
                    f"{where}: hidden_states.{key} belongs to mode {other[0]}, but hidden_states.mode is "
                    f"{states.get('mode', 'online')}; remove the key or change the mode"
                )
        if states.get("mode", "online") == "online" and states.get("store_url") is None:
            # A resolved config has them all, at their defaults.
            fields = {k: f for k, f in modes()["online"].model_fields.items() if k not in ("mode", "store_budget_gb")}
            unused = [key for key, value in states.items() if key in fields and value != fields[key].default]
            if unused:
                raise InputError(
                    f"{where}: hidden_states.{unused[0]} is of a store, and this online run has none; set "
                    "hidden_states.store_url, or hidden_states.mode=offline"
                )
        if "mode" not in states:
            values = {**values, "hidden_states": {"mode": "online", **states}}
    try:
        return placed(RunConfig.model_validate(values))
    except ValidationError as error:
        raise InputError(f"{where}: " + "; ".join(sentences(error))) from None


def config_from_form(values: Mapping[str, Any]) -> RunConfig:
    """Validate a flow's parameters: groups, or what the run form made of them.

    The form carries keys of a tab that was open before; those are dropped. Raises InputError as load_config does.
    """
    try:
        return placed(RunConfig.model_validate(values))
    except ValidationError as error:
        raise InputError("parameters: " + "; ".join(sentences(error))) from None


def sentences(error: ValidationError, *, group: str = "", model: type[BaseModel] = RunConfig) -> list[str]:
    """Pydantic's errors as sentences with the dotted key first. model: what was validated, as the config's `group`."""
    lines = []
    for fault in error.errors():
        path = [str(part) for part in fault["loc"] if str(part) not in modes()]
        key = ".".join([group, *path] if group else path) or "config"
        if fault["type"] == "extra_forbidden":
            names = _field_names(path[:-1], model)
            lines.append(f"unknown key {key!r}{nearest(path[-1], names)}")
        elif fault["type"] == "missing":
            lines.append(f"{key} is missing")
        elif fault["type"] == "value_error":
            lines.append(f"{key}: {fault['ctx']['error']}")
        else:
            message = fault["msg"][0].lower() + fault["msg"][1:]
            lines.append(f"{key}={fault['input']!r}: {message}")
    return lines


def _field_names(path: Sequence[str], model: type[BaseModel]) -> list[str]:
    for name in path:
        annotation = model.model_fields[name].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        model = annotation
    return list(model.model_fields)


def read_config(path: str, overrides: Sequence[str] = (), *, run_dir: str | None = None) -> RunConfig:
    """Read a YAML recipe, apply `group.key=value` overrides (values are YAML) and validate.

    Raises InputError when the file is missing or not YAML, or an override has no `=`.
    """
    values = read_values(path, overrides)
    if run_dir is not None:
        values["run_dir"] = run_dir
    return load_config(values, where=path)


def read_values(path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A YAML recipe with overrides applied, not yet validated. Raises InputError as read_config does."""
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except OSError as error:
        raise InputError(f"cannot read recipe {path!r}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected groups (target, data, ...) at the top, got {type(values).__name__}")
    for override in overrides:
        apply_override(values, override)
    return values


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set one dotted key in place from `group.key=value`, the value in YAML. Raises InputError when it is no such."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise InputError(f"--set {override!r}: expected key=value, for example train.steps=200")
    *groups, name = key.strip().split(".")
    node = values
    for group in groups:
        child = node.get(group)
        if child is None:
            child = node[group] = {}
        if not isinstance(child, dict):
            raise InputError(f"--set {override!r}: {group!r} is a value, not a group")
        node = child
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError(f"--set {override!r}: the value is not valid YAML; quote it") from None
    if isinstance(value, str):
        value = _as_number(value)
    if key == "hidden_states.mode" and node.get("mode", "online") != value and value in modes():
        # The mode was changed on purpose: what the recipe says of the other mode, its store first of all, is not meant.
        node.clear()
    node[name] = value


def _as_number(text: str) -> str | float:
    """YAML 1.1 reads `1e-4` as a string (it wants `1.0e-4`); people write `1e-4`."""
    try:
        return float(text) if "e" in text.lower() else text
    except ValueError:
        return text


def dump_config(config: BaseModel) -> str:
    """The resolved config as YAML, every default written out; `read_config` reads it back to an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
