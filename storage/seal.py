"""A checksum inside each zarr.json that we write.

Zarr's metadata has none, and a flipped bit in a dtype or a statistic's shape would read as other data. Held against
what this release would write, a store of another release, or of another version of zarr, would look damaged; so each
document carries its own: `attributes.crc32c`, of the document without that entry, as JSON with sorted keys, no blanks
and ASCII only.
"""

from __future__ import annotations

import json
from typing import Any

from storage.shard import checksum

_FIELD = "crc32c"


def sealed(document: dict[str, Any]) -> bytes:
    """The bytes of a zarr.json, its checksum added."""
    assert "attributes" in document
    attributes = {**document["attributes"], _FIELD: f"{_checksum(document):08x}"}
    return json.dumps({**document, "attributes": attributes}, indent=2).encode()


def unsealed(content: bytes) -> dict[str, Any]:
    """The document of such bytes, without its checksum. ValueError if they are not what was written."""
    document: Any = json.loads(content)
    attributes = document.get("attributes") if isinstance(document, dict) else None
    if not isinstance(attributes, dict) or _FIELD not in attributes:
        raise ValueError("it carries no checksum")
    found = attributes.pop(_FIELD)
    if found != f"{_checksum(document):08x}":
        raise ValueError("its checksum differs")
    return dict(document)


def _checksum(document: dict[str, Any]) -> int:
    return checksum(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())
