"""What the run form needs of the config's JSON schema, and pydantic does not give.

Prefect's server checks a form against the schema before a run starts, and says what it finds in the schema's own
words. Inside an alternative (`anyOf`: a number or nothing, this mode or that) these words are "not valid under any of
the given schemas", of a whole group. So limits stand beside the alternatives here, not inside: they bind the same
values, for a limit says nothing of null, and the answer names the one field and its limit. Pydantic's own checks stay
as they are.
"""

from __future__ import annotations

from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

_LIMITS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
# Where the store lies and how much there may be, what it keeps; then the rest, the mode's own field last.
_FIRST = ("store_url", "store_budget_gb", "on_missing", "preset")


def limits_beside(schema: dict[str, Any]) -> None:
    """Move the limits of `number or null` fields from the alternative to the field. For `json_schema_extra`."""
    for field in schema["properties"].values():
        for alternative in field.get("anyOf", ()):
            for limit in _LIMITS:
                if limit in alternative:
                    field[limit] = alternative.pop(limit)


def mode_form(schema: dict[str, Any]) -> None:
    """As limits_beside, and the fields of a mode in the form's order. For `json_schema_extra`."""
    limits_beside(schema)
    for place, (name, field) in enumerate(schema["properties"].items()):
        field["position"] = _FIRST.index(name) if name in _FIRST else len(_FIRST) + place
    schema["properties"]["mode"]["position"] = 100


class Tabs:
    """Annotation of a union discriminated by `mode`: one tab of the form each.

    As `anyOf`, which both of Prefect's interfaces draw as tabs; one of them does not so for pydantic's `oneOf`. Limits
    go out of the modes into a chain of `if mode is this then`, whose errors name the field.
    """

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        schema["anyOf"] = schema.pop("oneOf")
        schema.pop("discriminator")
        rules: dict[str, Any] = {}
        for alternative in schema["anyOf"]:
            fields = handler.resolve_ref_schema(alternative)["properties"]
            limits = {name: {k: field.pop(k) for k in _LIMITS if k in field} for name, field in fields.items()}
            rules = {
                "if": {"properties": {"mode": {"const": fields["mode"]["default"]}}},
                "then": {"properties": {name: limit for name, limit in limits.items() if limit}},
                **({"else": rules} if rules else {}),
            }
        return {**schema, **rules}
