"""The flow, with a real Prefect server, a real small target and real subprocesses."""

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

from flows.train_draft import train_draft
from storage.location import locate
from tasks.trainer.errors import InputError
from tasks.trainer.recipe import load_config

Values = Callable[..., dict[str, Any]]


def run_flow(values: dict[str, Any]) -> Path:
    config = load_config(values)
    train_draft(**{name: getattr(config, name) for name in type(config).model_fields})
    return Path(config.run_dir)


def artifacts(name: str = "train-draft-report") -> list[Any]:
    async def read() -> list[Any]:
        async with get_client() as client:
            key = ArtifactFilterKey(any_=[name])
            return await client.read_artifacts(artifact_filter=ArtifactFilter(key=key))

    return asyncio.run(read())


@pytest.mark.usefixtures("prefect_server")
def test_both_modes_end_to_end(recipe_values: Values, tmp_path: Path) -> None:
    """Red when a stage of the DAG is missing, the modes differ in one loss, or a run leaves no report and artifact."""
    names = ("train-draft-report", "train-draft-plan", "train-draft-depths")
    before = {one.id for name in names for one in artifacts(name)}  # the server has served other tests
    online = run_flow(recipe_values("online"))
    offline = {"mode": "offline", "store_url": str(tmp_path / "store"), "preset": "lossless"}
    hybrid = {"mode": "online", "store_url": str(tmp_path / "filled"), "preset": "lossless"}
    reports = {}
    runs = {"offline": offline, "hybrid": hybrid}
    for folder in (online, *(run_flow(recipe_values(name, hidden_states=states)) for name, states in runs.items())):
        report = json.loads((folder / "report.json").read_text())
        reports[folder.name] = report
        for name in ("report.md", "config.yaml", "plots/training.png", "plots/tau.png", "draft/config.json"):
            assert (folder / name).is_file(), name
        assert len(report["losses"]) == 8
        assert len(report["acc"]) == 3
        assert report["lossless"] is True
        assert report["tau"] >= 1.0
        assert 0 <= report["data_wait_seconds"] <= report["train_seconds"]
    assert reports["online"]["losses"] == reports["offline"]["losses"] == reports["hybrid"]["losses"]
    assert reports["online"]["stored_bytes_per_token"] == 0
    assert reports["online"]["raw_bytes_per_token"] == pytest.approx(reports["offline"]["raw_bytes_per_token"])
    for name in runs:
        assert 0 < reports[name]["stored_bytes_per_token"] < 2 * reports[name]["raw_bytes_per_token"]
    found, plans, tables = ([one for one in artifacts(name) if one.id not in before] for name in names)
    assert len(found) == 3
    assert all("data:image/png;base64," in artifact.data for artifact in found)
    assert "plots/" not in found[0].data.replace("data:", ""), "a server cannot read the run directory"
    assert len(plans) == 3
    assert all("offline near" in plan.data for plan in plans)
    assert min(plan.created for plan in plans) < min(one.created for one in found), "the plan comes first"
    depths = [json.loads(table.data) for table in tables]
    assert [[row["depth"] for row in table] for table in depths] == [[0, 1, 2]] * 3


@pytest.mark.usefixtures("prefect_server")
def test_a_finished_run_is_not_run_again(recipe_values: Values) -> None:
    """Red when the same run again trains again, or a changed evaluation is not measured."""
    values = recipe_values()
    folder = run_flow(values)
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "receipts").iterdir()}
    run_flow(recipe_values(evaluate={"num_prompts": 2}))
    after = {path.name: path.stat().st_mtime_ns for path in (folder / "receipts").iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"evaluate.json", "report.json"}
    assert json.loads((folder / "report.json").read_text())["acceptance"]["num_prompts"] == 2


@pytest.mark.usefixtures("prefect_server")
def test_memory_store_runs_in_one_process(recipe_values: Values) -> None:
    """Red when the capture's process takes a memory:// store with it."""
    folder = run_flow(recipe_values(hidden_states={"mode": "offline", "store_url": "memory://flow-test"}))
    assert json.loads((folder / "report.json").read_text())["capture"]["store_samples"] > 0


@pytest.mark.usefixtures("prefect_server")
def test_a_run_at_a_url_leaves_its_report_there(
    recipe_values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the flow takes a URL for a folder, or what it leaves stays in scratch."""
    monkeypatch.setenv("EYAS_SCRATCH", str(tmp_path / "scratch"))
    url = "memory://flow-run"
    run_flow({**recipe_values(), "run_dir": url})
    there = locate(url).sizes()
    for name in ("report.md", "report.json", "draft/config.json", "receipts/report.json"):
        assert name in there, name
    assert "data:image/png;base64," in artifacts()[-1].data
    assert not (tmp_path / "memory:").exists()


@pytest.mark.usefixtures("prefect_server")
def test_regenerated_answers_train_too(recipe_values: Values) -> None:
    """Red when data.regenerate keeps the file's answers, or a second run answers again."""
    folder = run_flow(recipe_values(data={"regenerate": True, "max_new_tokens": 16, "batch_size": 8}))
    report = json.loads((folder / "report.json").read_text())
    assert report["prepare"]["regenerated"] > 0
    assert list((folder / "data/answers").rglob("batch-*.jsonl"))


@pytest.mark.usefixtures("prefect_server")
def test_a_failing_stage_fails_the_flow_with_its_own_words(recipe_values: Values, tmp_path: Path) -> None:
    """Red when a stage's error is lost on the way out of its process, or the flow ends as if nothing were wrong."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(InputError, match=r"empty\.jsonl"):
        run_flow(recipe_values(data={"source": str(empty)}))


def test_importing_the_flow_imports_no_torch() -> None:
    """Red when a worker that only draws the form pays for torch and transformers."""
    code = (
        "import sys, flows.train_draft; "
        "sys.exit(', '.join({'torch', 'transformers', 'triton', 'zarr'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
