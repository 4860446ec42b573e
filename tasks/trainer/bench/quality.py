"""What `eyas bench quality` measures: a draft by Eyas and one by SpecForge, of the same data, shape, number of tokens
and order of packs, on the same held-out conversations with the same evaluator.

The recipe says everything. Ours is trained online by the trainer itself. SpecForge's `OnlineEagle3Model` gets the same
packs, each as one row, the same draft vocabulary and learning rate; its optimizer, clipping, warm-up and start are its
own. Both drafts are then measured teacher-forced, a conversation at a time, on the target's states.

Times are of a training step with the target in it, compilation left out; run nothing else on the GPU. An interrupted
experiment goes on where it was: what is trained is not trained again.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from kernels.bench.errors import BenchError
from kernels.bench.runner import Group, environment_of
from tasks.trainer.bench.codec_quality import EXACT, Trial, accuracies, make_run, prepare_data, start_run
from tasks.trainer.bench.codec_quality_run import QUALITY, Quality, evaluate_draft
from tasks.trainer.config import RunConfig
from tasks.trainer.data.prepared import PreparedData
from tasks.trainer.data.vocabulary import Vocabulary
from tasks.trainer.draft.shape import draft_shape, trained_draft
from tasks.trainer.export.warm_start import read_parent
from tasks.trainer.files import read_json, write_json
from tasks.trainer.run_dir import RunDir
from tasks.trainer.target import Target
from tasks.trainer.target_files import resolve, unpacked
from tasks.trainer.train.batches import Packs, Position
from tasks.trainer.train.curves import read_metrics

PEER = "specforge"
SCRIPT = Path(__file__).with_name("specforge_train.py")
_WARM_UP_STEPS = 20
_OVERVIEW = "quality.json"


@dataclass(frozen=True, slots=True)
class Row:
    """A trainer's draft."""

    trainer: str
    tokens: int
    """Trained on."""
    tokens_per_s: float
    """Of a step with the target in it."""
    acc: list[float]
    """acc_k, [K]."""
    tau: float
    """Simulated: 1 + the mean number of drafted tokens accepted in a row."""
    tau_of_means: float
    """1 + sum over k of acc_0 ... acc_k, biased, for comparing with others' figures."""


def measure(values: Mapping[str, Any], folder: Path, *, peer: Group | None, seed: int) -> list[Row]:
    """Train and evaluate what `folder` has no result of; values: a recipe's. Without a peer ours alone.

    Raises BenchError when a trainer fails (the last line of its log says why) or the recipe accumulates gradients.
    """
    prepared = prepare_data(values, folder)
    run, _ = make_run(values, Trial(EXACT, seed), folder, prepared)
    config = run.config()
    if config.train.grad_accumulation != 1:
        raise BenchError("the peer takes one pack a step: set train.grad_accumulation=1")
    if not (run.root / QUALITY).exists() and start_run(run).wait():
        raise BenchError(f"eyas failed: {_last_line(run.root / 'log.txt')}")
    rows = [_row("eyas", read_json(run.root / QUALITY), *_speed(run))]
    if peer is not None:
        home = folder / f"{PEER}-{seed}"
        if not (home / "peer.json").exists():
            _train_peer(config, run, home, peer)
        if not (home / QUALITY).exists():
            write_json(home / QUALITY, asdict(_evaluate_peer(config, run, home)))
        report = read_json(home / "peer.json")
        rows.append(_row(PEER, read_json(home / QUALITY), report["tokens"], report["tokens_per_s"]))
    write_json(folder / _OVERVIEW, [asdict(row) for row in rows])
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a markdown table."""
    lines = ["| trainer | tokens | tokens/s | acc by depth | tau | tau of means |", "|---|---|---|---|---|---|"]
    for row in rows:
        acc = " ".join(f"{share:.3f}".lstrip("0") for share in row.acc)
        lines.append(
            f"| {row.trainer} | {row.tokens:,} | {row.tokens_per_s:,.0f} | {acc} | {row.tau:.3f} | "
            f"{row.tau_of_means:.3f} |"
        )
    return "\n".join(lines)


def _row(trainer: str, quality: Mapping[str, Any], tokens: int, tokens_per_s: float) -> Row:
    acc = accuracies(quality)
    tau = 1.0 + sum(quality["tau_sum"]) / sum(quality["tau_rows"])
    return Row(trainer, tokens, tokens_per_s, acc.tolist(), tau, 1.0 + float(np.cumprod(acc).sum()))


def _speed(run: RunDir) -> tuple[int, float]:
    """Tokens of the run, and tokens a second after the first steps."""
    lines = list(read_metrics(run.metrics))
    timed = lines[_WARM_UP_STEPS:] or lines
    return sum(line["tokens"] for line in lines), sum(line["tokens"] for line in timed) / sum(
        line["seconds"] for line in timed
    )


def _train_peer(config: RunConfig, run: RunDir, home: Path, peer: Group) -> None:
    """Write what the peer reads, and run it."""
    receipt = run.receipt("prepare")
    assert receipt is not None
    home.mkdir(parents=True, exist_ok=True)
    target = Target.of(config.target, device="cpu")
    shape = _shape(config, run, target)
    weights = unpacked(resolve(config.target.model, revision=config.target.revision), str(target.dtype)[6:])
    shutil.copytree(weights, home / "target", dirs_exist_ok=True)
    data, vocabulary = PreparedData.open(run.train_data), Vocabulary.load(run.vocabulary)
    order = Packs(data.lengths, pack_tokens=config.train.pack_tokens, seed=config.train.seed)
    samples = [
        [data[number] for number in pack]
        for pack, _ in itertools.islice(order.read_from(Position()), config.train.steps)
    ]
    lengths = [sum(len(sample.token_ids) for sample in pack) for pack in samples]
    save_file(
        {
            "token_ids": torch.from_numpy(np.concatenate([one.token_ids for pack in samples for one in pack])),
            "loss_mask": torch.from_numpy(np.concatenate([one.loss_mask for pack in samples for one in pack])),
            "bounds": torch.tensor([0, *itertools.accumulate(lengths)]),
            "d2t": torch.from_numpy(vocabulary.d2t),
            "t2d": torch.from_numpy(vocabulary.t2d),
        },
        home / "packs.safetensors",
    )
    settings = {
        "device": receipt["device"],
        "seed": config.train.seed,
        "steps": config.train.steps,
        "learning_rate": config.train.learning_rate,
        "pack_tokens": config.train.pack_tokens,
        "aux_layer_ids": list(shape.aux_layer_ids),
        "shape": {**asdict(shape), "ttt_steps": config.train.ttt_steps},
    }
    write_json(home / "settings.json", settings)
    environment = environment_of(peer)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*peer.path, environment.get("PYTHONPATH")]))
    with (home / "log.txt").open("ab") as log:
        code = subprocess.run(
            [peer.python, peer.load, str(home)], stdout=log, stderr=log, env=environment, check=False
        ).returncode
    if code:
        raise BenchError(f"{PEER} failed: {_last_line(home / 'log.txt')}")


def _shape(config: RunConfig, run: RunDir, target: Target) -> Any:
    vocabulary = Vocabulary.load(run.vocabulary)
    return draft_shape(
        target.config,
        config.draft,
        vocab_size=len(vocabulary),
        target_vocab_size=target.vocab_size,
        aux_layer_ids=target.aux_layer_ids,
    )


def _evaluate_peer(config: RunConfig, run: RunDir, home: Path) -> Quality:
    receipt = run.receipt("prepare")
    assert receipt is not None
    target = Target.of(config.target, device=receipt["device"])
    parent = read_parent(str(home / "draft"), _shape(config, run, target))
    draft = trained_draft(parent.config, parent.tensors, embedding=target.embedding, dtype=target.dtype)
    return evaluate_draft(draft, target, run, ttt_steps=config.train.ttt_steps, step=config.train.steps)


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else "no word"
