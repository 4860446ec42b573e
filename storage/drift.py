"""Whether the states still are what the statistics were calibrated on.

Codes are steps of a channel's calibrated deviation, and a value outside their range is kept exactly, at six bytes and
more. So drift costs room, never truth; but a store of another kind of text than it was calibrated on may end larger
than the raw states. A few sinks a sample (whole rows of exceptions: its first token, in each layer) are left out, as
they are always exact; states that grew make sinks of all tokens, and those count.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.schema import NUM_AUX_LAYERS, StoreSpec

logger = logging.getLogger(__name__)

DRIFT_LIMIT = 0.01
_LAST_SAMPLES = 64
_FIRST_SAMPLES = 8
# Rows of a sample: four tokens in three layers and at the end.
_USUAL_SINKS = 16


class Drift:
    """The share of escaped values over the last 64 samples. Thread-safe."""

    def __init__(self, spec: StoreSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._last: deque[tuple[int, int]] = deque(maxlen=_LAST_SAMPLES)
        self._warned = False

    @property
    def share(self) -> float:
        """Escaped values to all values; 0 before the first sample."""
        with self._lock:
            return self._share()

    def add(self, arrays: Mapping[str, npt.NDArray[Any]], *, num_tokens: int) -> None:
        """Count one encoded sample; warn once when the share passes `DRIFT_LIMIT`."""
        if "exceptions" not in arrays:
            return
        hidden = self._spec.hidden_size
        rows = np.cumsum(arrays["exceptions"][:, 0], dtype=np.int64) // hidden
        _, counts = np.unique(rows, return_counts=True)
        rows_of_last = next((len(arrays[name]) for name in ("last_codes", "last_pairs") if name in arrays), 0)
        values = (num_tokens * NUM_AUX_LAYERS + rows_of_last) * hidden
        more_sinks = max(int((counts == hidden).sum()) - _USUAL_SINKS, 0)
        escaped = int(counts[counts < hidden].sum()) + more_sinks * hidden
        with self._lock:
            self._last.append((escaped, values))
            share = self._share()
            if share <= DRIFT_LIMIT or self._warned or len(self._last) < _FIRST_SAMPLES:
                return
            self._warned = True
        logger.warning(
            "%.1f%% of the values of the last %d samples lie outside the range of the store's calibrated statistics "
            "and are kept exactly, which costs room: the states differ from those it was calibrated on; capture such "
            "samples into another store URL",
            100 * share,
            len(self._last),
        )

    def _share(self) -> float:
        return sum(escaped for escaped, _ in self._last) / max(sum(values for _, values in self._last), 1)
