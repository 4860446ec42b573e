"""Which calls of fused kernels compute the base block of the active rows: decided on the host, once a document layout.

A run of active rows [start, end) of a document that begins at row d needs the keys d .. end. The kernels want shapes:

    flash   any number of documents a call, by cumulative lengths; causal is aligned bottom-right, so a run is one call.
            A call holds one run a document at most: its keys may not overlap.
    cuDNN   half of flash's time, but every new shape costs 100 ms, and causal is aligned top-left. So a run is computed
            as a causal square with rounded sides, and full attention over the rounded rest of the keys before it:

                keys   d ......... s' .... s .... end .. e'       s' = d + a multiple of 512,  s' <= s
                       [  full     ][   causal square    ]        e' - s' rounded up: 128 rows up to 2,048, then 512

            Rows of the square outside s .. end are dummies: whatever query lies there, its output is ignored and its
            gradient is kept at zero by a log-sum-exp of +inf. Keys past `end` are never attended by a row that counts.
            Documents of about one size are rounded to the same square and computed as one batch.

Two runs of a document with few rows between them are computed as one, with dummies between: that costs the dummies'
share of the pairs, two calls cost their launches. All costs are counted in pairs of a query and a key.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

Rows = slice | Tensor
"""Rows of a tensor, in order: a range, or an int64 index on the tensor's device."""

# What a cuDNN call more costs, forward and backward, in pairs: launches and the merge of its part take about 0.2 ms on
# an H200, in which cuDNN computes 2^21 pairs of 32 heads of 128 (16,384 rows: 134M pairs in 12.6 ms). Smaller models
# compute more pairs in that time (`_scaled`): theirs are fewer calls, and fewer shapes for cuDNN to prepare.
CUDNN_CALL_PAIRS = 2**21
WIDTH = 32 * 128
"""Query heads x head dim that the costs are of."""
# flash takes about twice cuDNN's time a pair (23.9 ms for the same), and is one call for all documents.
FLASH_SLOWDOWN = 2
# What gathering a row of a batch costs, forward and backward: some 90 kB of traffic (32 query, 8 key heads of 128), by
# kernels that move 1 TB/s. Documents of under about 2,000 tokens are better left where they lie, to flash.
GATHER_PAIRS = 1000
# What joining a run to the one before it may cost: a call more, which for a few rows runs far below the peak.
JOIN_PAIRS = 3 * 2**20


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive active rows of one document."""

    document: int
    """The first row of its document."""
    start: int
    end: int
    first: int
    """The place of row `start` among the active rows."""

    @property
    def num_rows(self) -> int:
        return self.end - self.start


def active_runs(document_lengths: tuple[int, ...], query_runs: tuple[tuple[int, int], ...] | None) -> tuple[Run, ...]:
    """The runs with their documents; every document is a run when query_runs is None.

    Raises ValueError for a run that is empty, not after the one before it, or not inside one document.
    """
    documents = [(start, end) for start, end in pairwise(accumulate(document_lengths, initial=0)) if end > start]
    if query_runs is None:
        return tuple(Run(start, start, end, start) for start, end in documents)
    runs: list[Run] = []
    remaining = iter(documents)
    document, document_end = 0, 0
    first, previous_end = 0, 0
    for index, (start, end) in enumerate(query_runs):
        name = f"query_runs[{index}] = ({start}, {end})"
        if start < 0 or end <= start:
            raise ValueError(f"{name} must be (start, end) with 0 <= start < end")
        if start < previous_end:
            raise ValueError(f"{name} begins before row {previous_end}, where the run before it ends: runs ascend")
        while start >= document_end:
            found = next(remaining, None)
            if found is None:
                raise ValueError(f"{name} lies past the last document, which ends at row {document_end}")
            document, document_end = found
        if end > document_end:
            raise ValueError(f"{name} crosses the end of its document at row {document_end}: split it there")
        runs.append(Run(document, start, end, first))
        first, previous_end = first + end - start, end
    return tuple(runs)


@functools.lru_cache(maxsize=64)
def cached_runs(document_lengths: tuple[int, ...], query_runs: tuple[tuple[int, int], ...] | None) -> tuple[Run, ...]:
    """`active_runs`, looked up by the K steps of a pack."""
    return active_runs(document_lengths, query_runs)


def num_active_rows(runs: Sequence[Run]) -> int:
    return runs[-1].first + runs[-1].num_rows if runs else 0


def keys_are_shared(runs: Iterable[Run]) -> bool:
    """Whether a base key is attended to by two runs: those of one document."""
    return any(left.document == right.document for left, right in pairwise(runs))


@dataclass(frozen=True, slots=True)
class Segment:
    """What some calls give for some of the active rows: one part of their softmax, or two parts over disjoint keys.

    The i-th of the n rows of the segment is active row rows[i], and row part_rows[i] of every part.
    """

    rows: Rows
    part_rows: Rows
    parts: tuple[Tensor, ...]
    """[N, H, Dh] each, contiguous: outputs, or gradients of the query."""
    lses: tuple[Tensor, ...]
    """[H, n] each, last-dim stride 1, natural logarithm; empty where the parts are gradients."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How rows of a tensor lie in a call's tensor, which may have dummy rows between and around them."""

    source: Rows
    """Row of the tensor at each of the call's rows; any row for a dummy."""
    num_rows: int
    """The call's rows, dummies included."""
    rows: Rows
    """The n rows of the tensor that count."""
    local: Rows
    """Where they lie in the call."""
    has_dummies: bool


@dataclass(frozen=True, slots=True)
class CudnnCall:
    """A batch of causal squares of one size, and full attention over as many keys before each."""

    queries: Placement
    keys: Placement
    batch: int
    size: int
    prefix: Rows | None
    num_prefix: int
    spans: tuple[tuple[Run, ...], ...]


@dataclass(frozen=True, slots=True)
class FlashCall:
    """One span a document, of any lengths."""

    queries: Placement
    keys: Rows
    query_bounds: Tensor
    """int32 [spans + 1], cumulative."""
    key_bounds: Tensor
    max_query: int
    max_key: int


Span = tuple[Run, ...]
"""Runs of one document computed as one; the rows between them are dummies."""


def _pairs(document: int, start: int, end: int) -> int:
    rows = end - start
    return rows * (start - document) + rows * (rows + 1) // 2


def _span_pairs(span: Span) -> int:
    return _pairs(span[0].document, span[0].start, span[-1].end)


def _start(span: Span) -> int:
    return span[0].start


def _scaled(pairs: int, width: int) -> int:
    """A cost that is no computation, in pairs of `width` = H Dh."""
    return pairs * WIDTH // width


def join_runs(runs: Sequence[Run], *, width: int = WIDTH) -> list[Span]:
    """Spans: a run joins the one before it where that costs less than computing both. width: H Dh."""
    spans: list[Span] = []
    call_pairs, join_pairs = _scaled(CUDNN_CALL_PAIRS, width), _scaled(JOIN_PAIRS, width)
    # Short spans of several documents share a flash call, so a call saved in one document saves its share only.
    num_documents = max(1, sum(1 for _ in groupby(runs, key=lambda run: run.document)))
    for run in runs:
        if spans and spans[-1][0].document == run.document:
            joined = (*spans[-1], run)
            pairs = _span_pairs(joined)
            extra = pairs - _span_pairs(spans[-1]) - _span_pairs((run,))
            if extra <= (join_pairs if pairs >= call_pairs else join_pairs // num_documents):
                spans[-1] = joined
                continue
        spans.append((run,))
    return spans


def _square(span: Span) -> tuple[int, int, int]:
    """(first row, rows, keys before it) of a span's causal square."""
    document, start, end = span[0].document, span[0].start, span[-1].end
    prefix = (start - document) // 512 * 512
    rows = end - document - prefix
    return document + prefix, _rounded(rows), prefix


def _rounded(rows: int) -> int:
    step = 128 if rows <= 2048 else 512
    return -(-rows // step) * step


def _batches(spans: Sequence[Span], call_pairs: int) -> list[list[Span]]:
    """Spans of one prefix, longest first, in batches that are all computed at the size of their first, which may waste
    as many pairs as a call costs."""
    batches: list[list[Span]] = []

    def order(span: Span) -> tuple[int, int, int]:
        _, size, prefix = _square(span)
        return prefix, -size, span[0].start

    size, prefix, waste = 0, -1, 0
    for span in sorted(spans, key=order):
        _, own_size, own_prefix = _square(span)
        more = (size * size - own_size * own_size) // 2 + (size - own_size) * own_prefix
        if own_prefix == prefix and waste + more <= call_pairs:
            batches[-1].append(span)
            waste += more
        else:
            batches.append([span])
            size, prefix, waste = own_size, own_prefix, 0
    return batches


def plan_calls(
    runs: Sequence[Run], num_keys: int, device: torch.device, use_cudnn: bool, *, width: int = WIDTH
) -> list[CudnnCall | FlashCall]:
    """The calls that compute the base block of all runs, each active row in exactly one of them. width: H Dh."""
    spans = join_runs(runs, width=width)
    call_pairs = _scaled(CUDNN_CALL_PAIRS, width)
    calls: list[CudnnCall | FlashCall] = []
    for_flash = spans
    if use_cudnn:
        for_flash = []
        for batch in _batches(spans, call_pairs):
            _, size, prefix = _square(batch[0])
            batch.sort(key=_start)
            padded = len(batch) * (size * size // 2 + size * prefix)
            if len(batch) > 1 and not _follow_one_another(batch, size):
                padded += len(batch) * size * GATHER_PAIRS
            if padded + call_pairs <= FLASH_SLOWDOWN * sum(_span_pairs(span) for span in batch):
                calls.append(_cudnn_call(batch, size, num_keys, num_active_rows(runs), device))
            else:
                for_flash += batch
    calls += flash_calls(for_flash, device)
    return calls


def _follow_one_another(batch: Sequence[Span], size: int) -> bool:
    """Whether the squares of a batch are one range of rows, without dummies."""
    starts = [_start(span) for span in batch]
    return all(span[-1].end - _start(span) == size for span in batch) and all(
        after - before == size for before, after in pairwise(starts)
    )


def flash_calls(spans: Iterable[Span], device: torch.device) -> list[FlashCall]:
    """The r-th span of every document makes the r-th call."""
    rounds: list[list[Span]] = []
    for _, of_document in groupby(sorted(spans, key=_start), key=lambda span: span[0].document):
        for index, span in enumerate(of_document):
            if index == len(rounds):
                rounds.append([])
            rounds[index].append(span)
    return [_flash_call(spans_of_round, device) for spans_of_round in rounds]


def _flash_call(spans: list[Span], device: torch.device) -> FlashCall:
    num_rows = [span[-1].end - span[0].start for span in spans]
    keys = [(span[0].document, span[-1].end) for span in spans]
    num_keys = [end - start for start, end in keys]
    places = list(accumulate(num_rows, initial=0))
    return FlashCall(
        queries=_place_queries(spans, [span[0].start for span in spans], places, device),
        keys=_rows(keys, device),
        query_bounds=_tensor(places, torch.int32, device),
        key_bounds=_tensor(list(accumulate(num_keys, initial=0)), torch.int32, device),
        max_query=max(num_rows),
        max_key=max(num_keys),
    )


def _cudnn_call(spans: list[Span], size: int, num_keys: int, num_active: int, device: torch.device) -> CudnnCall:
    starts = [_square(span)[0] for span in spans]
    prefix = starts[0] - spans[0][0].document
    places = [index * size for index in range(len(spans) + 1)]
    ends = [span[-1].end for span in spans]
    key_rows = list(zip(starts, ends, strict=True))
    if len(spans) == 1 and starts[0] + size <= num_keys:
        key_source: Rows = slice(starts[0], starts[0] + size)
    elif all(end - start == size for start, end in key_rows):
        key_source = _rows(key_rows, device)
    else:
        source = torch.tensor(starts)[:, None] + torch.arange(size)
        key_source = _on(source.clamp(max=num_keys - 1).flatten(), device)
    queries = _place_queries(spans, starts, places, device)
    if len(spans) == 1 and not isinstance(queries.local, Tensor):
        # Other active rows serve as dummies, without a copy, where there are enough of them.
        first = spans[0][0].first - queries.local.start
        if first >= 0 and first + size <= num_active:
            queries = Placement(slice(first, first + size), size, queries.rows, queries.local, queries.has_dummies)
    return CudnnCall(
        queries=queries,
        keys=Placement(
            source=key_source,
            num_rows=places[-1],
            rows=_rows(key_rows, device),
            local=_rows([(p, p + end - start) for p, (start, end) in zip(places, key_rows, strict=False)], device),
            has_dummies=any(end - start != size for start, end in key_rows),
        ),
        batch=len(spans),
        size=size,
        prefix=_rows([(start - prefix, start) for start in starts], device) if prefix else None,
        num_prefix=prefix,
        spans=tuple(spans),
    )


def _place_queries(spans: list[Span], starts: list[int], places: list[int], device: torch.device) -> Placement:
    """Rows starts[i] .. of the document lie at places[i] .. places[i + 1] of the call."""
    rows = [(run.first, run.first + run.num_rows) for span in spans for run in span]
    local = [
        (place + run.start - start, place + run.end - start)
        for span, start, place in zip(spans, starts, places, strict=False)
        for run in span
    ]
    active, at = _rows(rows, device), _rows(local, device)
    has_dummies = sum(end - start for start, end in rows) != places[-1]
    source = active
    if has_dummies:
        index = torch.zeros(places[-1], dtype=torch.int64)
        for (first, end), (place, place_end) in zip(rows, local, strict=True):
            index[place:place_end] = torch.arange(first, end)
        source = _on(index, device)
    return Placement(source, places[-1], active, at, has_dummies)


def _rows(ranges: list[tuple[int, int]], device: torch.device) -> Rows:
    """The rows of ascending ranges: one range if they are consecutive."""
    if all(left[1] == right[0] for left, right in pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1])
    return _on(torch.cat([torch.arange(start, end) for start, end in ranges]), device)


def _on(index: Tensor, device: torch.device) -> Tensor:
    return index.to(device)


def _tensor(values: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)
