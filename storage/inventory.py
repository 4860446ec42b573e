"""What a fingerprint of a store holds and takes, as `eyas store info` and `ls` say it.

Ratios are against the same content without a store: bfloat16 states, last hidden ones on target rows only (see
`storage.schema.raw_bytes`). A trainer that keeps them for every row would need more.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from storage.errors import StoreError
from storage.index import STATES_FOLDER, read_index, read_spec
from storage.location import locate
from storage.presets import preset_name
from storage.schema import FORMAT_VERSION, NUM_AUX_LAYERS, StoreSpec, raw_bytes
from storage.segment import shard_bytes, shard_layouts


@dataclass(frozen=True, slots=True)
class Inventory:
    """One fingerprint. Bytes are bytes, not MB."""

    url: str
    """The store."""
    spec: StoreSpec
    """What its states are."""
    num_samples: int
    """Committed samples."""
    num_tokens: int
    """Their tokens."""
    num_targets: int
    """Their target rows."""
    num_exceptions: int
    """Their values that are kept exactly beside the codes."""
    num_segments: int
    """Writers that committed any of them."""
    array_bytes: dict[str, int]
    """By array, bytes of the samples' shards."""
    total_bytes: int
    """Everything under the fingerprint's folder, what killed writers left included."""
    raw_bytes: int
    """The content without a store."""

    @property
    def ratio(self) -> float:
        """How many times smaller than raw the folder is; 0 without samples."""
        return self.raw_bytes / self.total_bytes if self.num_samples else 0.0

    @property
    def state_ratios(self) -> dict[str, float]:
        """By array of states, how many times smaller than their bfloat16 its shards are."""
        hidden = 2 * self.spec.hidden_size
        raw = {"aux": self.num_tokens * NUM_AUX_LAYERS * hidden, "last": self.num_targets * hidden}
        raw["topk"] = raw["last"]
        return {
            name: raw[name.partition("_")[0]] / size
            for name, size in self.array_bytes.items()
            if name.partition("_")[0] in raw and size
        }

    def document(self) -> dict[str, Any]:
        """For `--json`: its fields are a promise to scripts."""
        return {
            "url": self.url,
            "fingerprint": self.spec.fingerprint,
            "format_version": FORMAT_VERSION,
            "target": self.spec.target,
            "aux_layer_ids": list(self.spec.aux_layer_ids),
            "hidden_size": self.spec.hidden_size,
            "vocab_size": self.spec.vocab_size,
            "preset": preset_name(self.spec.encoding),
            "encoding": dataclasses.asdict(self.spec.encoding),
            "chunk_tokens": self.spec.chunk_tokens,
            "shard_tokens": self.spec.shard_tokens,
            "samples": self.num_samples,
            "tokens": self.num_tokens,
            "target_rows": self.num_targets,
            "exceptions": self.num_exceptions,
            "segments": self.num_segments,
            "ratio": self.ratio,
            "raw_bytes": self.raw_bytes,
            "total_bytes": self.total_bytes,
            "bytes_by_array": self.array_bytes,
            "ratio_by_array": self.state_ratios,
        }


def take_inventory(url: str, fingerprint: str) -> Inventory:
    """Counts from the index, and the bytes that the files really take (lists all of them).

    StoreError: a damaged index or attributes. OSError if the files cannot be listed.
    """
    root = locate(url)
    folder = root.child(fingerprint)
    spec = read_spec(folder.child(STATES_FOLDER))
    if spec is None:
        raise StoreError(f"store {root.url} holds no fingerprint {fingerprint}")
    entries = read_index(folder).values()
    num_tokens, num_targets = (sum(counts) for counts in (
        (entry.num_tokens for entry in entries), (entry.num_targets for entry in entries)
    ))  # fmt: skip
    return Inventory(
        url=root.url,
        spec=spec,
        num_samples=len(entries),
        num_tokens=num_tokens,
        num_targets=num_targets,
        num_exceptions=sum(entry.num_exceptions for entry in entries),
        num_segments=len({entry.segment for entry in entries}),
        array_bytes={
            name: sum(shard_bytes(entry, layout) for entry in entries) for name, layout in shard_layouts(spec).items()
        },
        total_bytes=folder.total_bytes(),
        raw_bytes=raw_bytes(spec, num_tokens=num_tokens, num_targets=num_targets),
    )
