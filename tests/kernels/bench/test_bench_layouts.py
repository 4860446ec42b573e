"""Documents and rows that the benchmarks lay out, against the rule by its words."""

from __future__ import annotations

import pytest

from kernels.bench import layouts


@pytest.mark.parametrize("layout", [layouts.ALL, layouts.ANSWER, layouts.TURNS])
@pytest.mark.parametrize("tokens", [64, 100, 1000])
def test_counting_rows_follow_the_rule(layout: str, tokens: int) -> None:
    """Red when a row counts without all its tokens supervised, or one that has them does not."""
    spans = layouts.supervised_spans(tokens, layout)
    supervised = {token for start, end in spans for token in range(start, end)}
    assert len(supervised) / tokens == pytest.approx(1.0 if layout == layouts.ALL else 0.25, abs=0.04)
    for step in range(4):
        rows = {row for start, end in layouts.counting_rows(spans, step) for row in range(start, end)}
        wanted = range(step + 2)
        assert rows == {row for row in range(tokens) if all(row + 1 + i in supervised for i in wanted)}
    active = {row for start, end in layouts.active_rows(spans) for row in range(start, end)}
    assert active == {row for start, end in layouts.counting_rows(spans, 0) for row in range(start, end)}


@pytest.mark.parametrize("tokens", [100, 1280, 1281, 16384])
def test_documents_fill_the_row(tokens: int) -> None:
    """Red when lengths do not sum to the row, leave their bounds, or change between runs."""
    lengths = layouts.document_lengths(tokens)
    assert sum(lengths) == tokens
    assert all(768 <= length <= 1280 for length in lengths[:-1])
    assert 1 <= lengths[-1] <= 1280
    assert lengths == layouts.document_lengths(tokens)
