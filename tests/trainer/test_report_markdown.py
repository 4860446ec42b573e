"""The report's words on the data, from a real receipt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.report_markdown import _data
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import run_stage


@pytest.mark.parametrize("long_documents", ["alone", "cut"])
def test_packs_and_long_documents_are_told(long_documents: str, recipe_values: Callable[..., dict[str, Any]]) -> None:
    """Red when the report keeps quiet about documents that train alone, or supervised tokens that were cut."""
    values = recipe_values(data={"long_documents": long_documents, "max_tokens": 256}, train={"pack_tokens": 48})
    receipt = run_stage("prepare", RunDir.create(load_config(values)), silent)
    packs, text = receipt["packs"], _data({"prepare": receipt})
    assert f"An epoch is {packs['packs']} packs of up to 48 tokens, {packs['unfilled']:.1%} of their room empty" in text
    alone = f"{packs['alone']} documents are longer and train alone, the longest {packs['longest']} tokens"
    assert (alone in text) == (long_documents == "alone")
    assert f"Supervised tokens lost by cutting: {receipt['supervised_cut']}." in text
    assert (receipt["supervised_cut"] > 0) == (long_documents == "cut")
    assert ("cut to pack" in text) == (long_documents == "cut")
