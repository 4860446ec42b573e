"""Attention of documents that lie one after the other, against the softmax it stands for."""

from __future__ import annotations

import pytest
import torch

from kernels.document_attention import document_attention


def truth(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """One softmax over all rows, in the type of the inputs."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(query.device)
    at = torch.arange(len(query), device=query.device)
    seen = (document[:, None] == document) & (at[:, None] >= at)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("ihd,jhd->hij", query, key) * query.shape[-1] ** -0.5
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)


@pytest.mark.parametrize("lengths", [[37], [1, 1, 30], [5, 0, 17, 64, 3]], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=str)
def test_documents_do_not_see_each_other(device: torch.device, lengths: list[int], heads: tuple[int, int]) -> None:
    """Red when a row sees another document or a later row, heads are grouped otherwise, or the error is above that of
    a naive softmax in the same precision."""
    torch.manual_seed(0)
    shape = sum(lengths), heads[0], 64
    # As a model gives them: views of [1, H, T, Dh].
    states = [
        torch.empty(n, shape[0], 64, device=device).uniform_(-1, 1).transpose(0, 1) for n in (heads[0], *heads[1:] * 2)
    ]
    low = [one.to(torch.bfloat16) for one in states]
    exact = truth(*(one.double() for one in low), lengths)
    ours = document_attention(*low, document_lengths=lengths)
    assert (ours.dtype, ours.shape) == (torch.bfloat16, shape)
    naive = (truth(*low, lengths).double() - exact).abs().max()
    assert (ours.double() - exact).abs().max() <= naive + 2**-8


def test_lengths_of_other_rows_are_refused() -> None:
    """Red when documents that do not add up go unnoticed."""
    rows = torch.zeros(5, 2, 8)
    with pytest.raises(ValueError, match=r"document_lengths=\[3, 3\] are not those of 5 rows"):
        document_attention(rows, rows, rows, document_lengths=[3, 3])
    assert document_attention(rows[:0], rows[:0], rows[:0], document_lengths=[]).shape == (0, 2, 8)
