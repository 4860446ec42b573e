"""The nightly deployment on a real server: its schedule, a night that promotes, and one with nothing new."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.conftest import write_conversations, write_target
from tests.e2e.conftest import Server, wait_for


def predictable(target: Path) -> Path:
    """A target whose next token hangs on the last one, mostly: a draft learns it in a few steps."""
    path = target / "model.safetensors"
    tensors = load_file(path)
    weak = {
        name: 0.05 * tensor if ".layers." in name and tensor.ndim == 2 else tensor for name, tensor in tensors.items()
    }
    save_file(weak, path, metadata={"format": "pt"})
    return target


def test_the_next_night_is_scheduled(server: Server) -> None:
    """Red when the schedule is missing or paused, or the server's next run of it is not the next 02:00 UTC."""
    deployment = server.deployment("nightly")
    (schedule,) = deployment["schedules"]
    assert schedule["active"] is True
    assert schedule["slug"] == "every-night"
    now = datetime.now(UTC)
    expected = now.replace(hour=2, minute=0, second=0, microsecond=0)
    expected += timedelta(days=1) if expected <= now else timedelta(0)
    query = {"deployments": {"id": {"any_": [deployment["id"]]}}, "sort": "EXPECTED_START_TIME_ASC", "limit": 1}
    # The server's scheduler comes by once a minute.
    runs = wait_for(lambda: server.call("/flow_runs/filter", query), 120, "a scheduled night")
    assert datetime.fromisoformat(runs[0]["expected_start_time"]) == expected


def test_a_night_promotes_and_the_next_one_has_nothing_to_do(server: Server, tmp_path: Path) -> None:
    """Red when a night started from the UI promotes nothing, or a second one trains again on the same conversations."""
    target = predictable(write_target(tmp_path / "target"))
    (tmp_path / "logs").mkdir()
    write_conversations(tmp_path / "logs" / "monday.jsonl", 40, seed=1)
    fixed = write_conversations(tmp_path / "fixed.jsonl", 8, seed=99)
    changes = {
        "target": {"model": str(target)},
        "data": {
            "source": str(tmp_path / "logs" / "*.jsonl"), "heldout_source": str(fixed), "heldout_fraction": 0.15,
            "regenerate": True, "max_new_tokens": 24, "batch_size": 64,
        },
        "hidden_states": {"store_url": str(tmp_path / "store"), "preset": "lossless"},
        "train": {"steps": 40, "pack_tokens": 512, "learning_rate": 1e-2, "evaluate_every": 0},
        "nightly": {
            "home": str(tmp_path / "home"), "min_new": 5, "min_recent": 4, "num_prompts": 6, "recent_heldout": 0.3,
            "first_steps": 8, "floor": "untrained",
        },
    }  # fmt: skip
    night = server.start("nightly", **changes)
    server.wait(night, "COMPLETED", seconds=300)
    champion = json.loads((tmp_path / "home" / "champion.json").read_text())
    again = server.start("nightly", **changes)
    server.wait(again, "COMPLETED", seconds=120)
    assert json.loads((tmp_path / "home" / "champion.json").read_text()) == champion
    artifacts = server.call("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [night, again]}}})
    reports = {each["flow_run_id"]: each["data"] for each in artifacts if each["key"] == "nightly-report"}
    assert set(reports) == {night, again}
    assert "Nothing new" in reports[again]
    events = {"filter": {"event": {"name": ["draft.promoted"]}}}
    promoted = server.call("/events/filter", events)["events"]
    assert len([event for event in promoted if str(tmp_path) in json.dumps(event)]) == 1
