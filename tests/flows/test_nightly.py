"""Nights with a real Prefect server, a real small target, real training and real decoding.

The target's layers are weak beside its embedding, so that a small draft learns in seconds what it says next. Stages run
in this process, for the store lies in memory://; that they run as processes of their own is test_train_draft's matter.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from safetensors.torch import load_file, save_file

from flows.cli import main
from flows.nightly import nightly_retrain
from tasks.trainer.champion import Champion
from tasks.trainer.config_nightly import load_nightly
from tasks.trainer.errors import InputError
from tasks.trainer.nightly.home import Home
from tasks.trainer.parent import parent_digest
from tasks.trainer.recipe import read_config
from tests.conftest import write_conversations, write_target

pytestmark = pytest.mark.usefixtures("prefect_server")

Night = Callable[..., dict[str, Any]]


def weaken_layers(target: Path) -> None:
    path = target / "model.safetensors"
    tensors = load_file(path)
    weak = {
        name: 0.05 * tensor if ".layers." in name and tensor.ndim == 2 else tensor for name, tensor in tensors.items()
    }
    save_file(weak, path, metadata={"format": "pt"})


@pytest.fixture
def start(tmp_path: Path) -> Night:
    """Starts the flow; keyword arguments replace keys of a group."""
    weaken_layers(write_target(tmp_path / "target"))
    write_conversations(tmp_path / "fixed.jsonl", 8, seed=99)
    values: dict[str, dict[str, object]] = {
        "target": {"model": str(tmp_path / "target"), "dtype": "bfloat16"},
        "data": {
            "source": str(tmp_path / "logs/*.jsonl"), "heldout_source": str(tmp_path / "fixed.jsonl"),
            "heldout_fraction": 0.15, "max_tokens": 96, "regenerate": True, "max_new_tokens": 24, "batch_size": 64,
        },
        "hidden_states": {"mode": "offline", "store_url": f"memory://{tmp_path.name}/store", "preset": "lossless"},
        "draft": {"vocab_size": 200},
        "train": {
            "steps": 40, "ttt_steps": 3, "pack_tokens": 512, "learning_rate": 1e-2, "warmup_steps": 2,
            "evaluate_every": 0, "trackers": [], "device": "cpu", "dtype": "float32",
        },
        "evaluate": {"num_prompts": 2, "max_new_tokens": 12, "draft_tokens": 3, "bootstrap_samples": 200,
                     "dtype": "float32"},
        "nightly": {
            "home": str(tmp_path / "home"), "min_new": 5, "min_recent": 4, "num_prompts": 6, "recent_heldout": 0.3,
            "first_steps": 8, "floor": "untrained",
        },
    }  # fmt: skip

    def run(**groups: dict[str, object]) -> dict[str, Any]:
        config = load_nightly({name: {**group, **groups.get(name, {})} for name, group in values.items()})
        result: dict[str, Any] = nightly_retrain(**{name: getattr(config, name) for name in type(config).model_fields})
        return result

    return run


def arrive(tmp_path: Path, name: str, seed: int) -> None:
    (tmp_path / "logs").mkdir(exist_ok=True)
    write_conversations(tmp_path / f"logs/{name}.jsonl", 40, seed=seed)


def promoted_events(home: str, count: int) -> list[dict[str, Any]]:
    """At least so many, oldest first; the server has them a moment after they are sent."""

    async def read() -> list[dict[str, Any]]:
        wanted = {"filter": {"event": {"name": ["draft.promoted"]}}}
        async with get_client() as client:
            for _ in range(300):
                answer = await client._client.post("/events/filter", json=wanted)
                events: list[dict[str, Any]] = answer.json()["events"]
                ours = [event for event in events if event["resource"]["prefect.resource.name"] == home]
                if len(ours) >= count:
                    break
                await asyncio.sleep(0.1)
        return sorted(ours, key=lambda event: str(event["occurred"]))

    return asyncio.run(read())


def reports(home: str) -> list[str]:
    """Descriptions of the artifacts, oldest first."""

    async def read() -> list[Any]:
        async with get_client() as client:
            key = ArtifactFilterKey(any_=["nightly-report"])
            return await client.read_artifacts(artifact_filter=ArtifactFilter(key=key))

    found = [each for each in asyncio.run(read()) if each.description.endswith(home)]
    return [str(each.data) for each in sorted(found, key=lambda each: each.created)]


class Crash(Exception):
    pass


def test_a_week(start: Night, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a first night does not promote, a start with no new data trains, a crash between training and promotion
    loses the night or promotes it twice, a worse draft is promoted, or a new revision of the target is judged by the
    old one's figures."""
    home = str(tmp_path / "home")
    champion = Champion(Home.open(home).place)

    arrive(tmp_path, "monday", 1)
    first = start()
    assert (first["outcome"], first["night"], first["entry"]) == ("promoted", 1, 1), first["reasons"]

    again = start()
    assert (again["outcome"], again["night"]) == ("nothing_to_do", None)
    assert again["reasons"] == ["nothing new: all 40 conversations were there before"]
    assert Home.open(home).numbers() == [1]

    arrive(tmp_path, "tuesday", 2)
    publish = Champion.publish

    def crash(self: Champion, draft: Path, digest: str) -> None:
        raise Crash

    monkeypatch.setattr(Champion, "publish", crash)
    with pytest.raises(Crash):
        start()
    monkeypatch.setattr(Champion, "publish", publish)
    assert champion.history().champion == 1
    run = tmp_path / "home/nights/0002/run"
    trained = {path: path.stat().st_mtime_ns for path in (run / "checkpoints").rglob("*.safetensors")}
    assert trained
    config = read_config(str(run / "config.yaml"))
    assert config.draft.init == champion.folder(champion.history().entry(1)).path
    assert config.train.steps == 40
    arrive(tmp_path, "late", 3)  # while the night was down: tomorrow's
    rerun = start()
    assert (rerun["outcome"], rerun["night"], rerun["entry"]) == ("promoted", 2, 2), rerun["reasons"]
    assert {path: path.stat().st_mtime_ns for path in trained} == trained, "it was trained once"
    history = champion.history()
    assert [(change.kind, change.entry) for change in history.changes] == [("promoted", 1), ("promoted", 2)]
    assert history.entry(2).figures["recent"]["low"] > 0
    assert parent_digest(champion.folder(history.entry(2)).path) == parent_digest(str(run / "draft"))
    same_vocabulary = [
        load_file(f"{champion.folder(entry).path}/model.safetensors")["d2t"] for entry in history.entries
    ]
    assert same_vocabulary[0].equal(same_vocabulary[1])

    worse = start(train={"learning_rate": 1.0, "max_grad_norm_ratio": 0.0})
    assert (worse["outcome"], worse["night"]) == ("not_promoted", 3)
    assert "not shown to be better" in "".join(worse["reasons"])
    assert champion.history().champion == 2
    assert start()["outcome"] == "nothing_to_do"

    write_target(tmp_path / "target", seed=1)
    weaken_layers(tmp_path / "target")
    revised = start()
    assert revised["outcome"] == "promoted", revised["reasons"]
    history = champion.history()
    assert [change.kind for change in history.changes] == ["promoted", "promoted", "measured", "promoted"]
    measured = history.changes[2]
    assert measured.entry == 2
    assert measured.note["fingerprint"] == history.entry(3).fingerprint != history.entry(2).fingerprint
    assert measured.note["tau"] == history.entry(3).figures["fixed"]["other"]
    assert revised["counts"]["fresh"] == revised["counts"]["trained"] > 40

    events = promoted_events(home, 3)
    assert [event["payload"]["champion"] for event in events] == [1, 2, 3]
    assert events[-1]["payload"]["url"] == champion.folder(history.entry(3)).url
    told = reports(home)
    titles = [text.splitlines()[0] for text in told]
    assert titles == ["# Night 1", "# No night", "# Night 2", "# Night 3", "# No night", "# Night 4"]
    assert "**Promoted**" in told[2]
    assert "**Not promoted**" in told[3]
    assert "new revision" in told[5]

    judgement = run.parent.parent / "0004/run/judgement.json"
    before = json.loads(judgement.read_text())
    command = [sys.executable, "-m", "tasks.trainer.stages", "judge", str(judgement.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert json.loads(judgement.read_text()) == before


def test_two_at_once_and_mistakes_are_refused(start: Night, tmp_path: Path) -> None:
    """Red when a night starts beside another one, or what is wrong with its values is told in pydantic's words."""
    arrive(tmp_path, "monday", 1)
    with Home.open(str(tmp_path / "home")).hold(), pytest.raises(InputError, match="another process works on it"):
        start()
    with pytest.raises(InputError, match=r"data\.heldout_source is missing"):
        start(data={"heldout_source": None})
    with pytest.raises(InputError, match=r"unknown key 'nightly\.reply'; did you mean 'replay'"):
        start(nightly={"reply": 0.5})
    assert Home.open(str(tmp_path / "home")).numbers() == []


def test_the_command_says_what_came_out(start: Night, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when `eyas nightly` ends without a word, --json is no object, or a mistake is a traceback."""
    arrive(tmp_path, "monday", 1)
    recipe = tmp_path / "recipe.yaml"
    values = {
        "target": {"model": str(tmp_path / "target")},
        "data": {"source": str(tmp_path / "logs/*.jsonl"), "heldout_source": str(tmp_path / "fixed.jsonl")},
        "train": {"device": "cpu"},
    }
    recipe.write_text(json.dumps(values))  # JSON is YAML
    home = str(tmp_path / "home")
    with pytest.raises(SystemExit) as exit_:
        main(["nightly", str(recipe), "--home", home, "--json"])
    assert not exit_.value.code
    assert json.loads(capsys.readouterr().out)["outcome"] == "nothing_to_do"
    with pytest.raises(SystemExit):
        main(["nightly", str(recipe), "--home", home])
    last = capsys.readouterr().out.splitlines()
    assert last[0].startswith("* 40 new conversations are fewer than nightly.min_new=100")
    assert last[-1] == "no night: nothing to do"
    for arguments in (["champion", "show", home], ["nightly", str(recipe), "--set", "nightly.replay=2"]):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 2
        assert capsys.readouterr().err.count("error: ") == 1


def test_importing_the_flow_imports_no_torch() -> None:
    """Red when a worker that only draws the form pays for torch and transformers."""
    code = (
        "import sys, flows.nightly; "
        "sys.exit(', '.join({'torch', 'transformers', 'triton', 'zarr'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
