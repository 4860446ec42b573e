"""A large cut file: read in a stream, in little memory, and the cut is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
NUM_BYTES = 125_000_000

READ = """
import json, os, re, resource, sys
from tasks.trainer.data.read import Refusals, stream_conversations
from tasks.trainer.errors import InputError
def peak():
    # On Linux a new process inherits ru_maxrss from the one that started it.
    if not os.path.exists("/proc/self/status"):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024  # macOS counts bytes
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
before = peak()
refusals, answers = Refusals(), 0
for conversation, _ in stream_conversations([sys.argv[1]], on_truncated="keep", refusals=refusals):
    answers += sum(message.role == "assistant" for message in conversation.messages)
try:
    for _ in stream_conversations([sys.argv[1]], refusals=Refusals()):
        pass
    stopped = ""
except InputError as error:
    stopped = str(error)
after = peak()
print(json.dumps([answers, refusals.counts, refusals.first, stopped, before, after]))
"""


def test_a_cut_file_of_125_mb_is_read_in_a_stream(tmp_path: Path) -> None:
    """Red when memory grows with the file, a whole record is lost, or the cut is not told with its byte."""
    answer = 'The "river" {and} the [hills], said the eagle.\\n\n' * 60
    record = json.dumps(
        {"id": "x", "conversations": [{"from": "human", "value": "Question?"}, {"from": "gpt", "value": answer}] * 2},
        indent=1,
    ).encode()
    path = tmp_path / "sharegpt.json"
    num_whole = NUM_BYTES // (len(record) + 2)
    with path.open("wb") as file:
        file.write(b"[")
        for _ in range(num_whole):
            file.write(record + b",\n")
        file.write(record[: len(record) // 2])
    assert path.stat().st_size >= NUM_BYTES
    process = subprocess.run(
        [sys.executable, "-c", READ, str(path)], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    answers, counts, first, stopped, before, after = json.loads(process.stdout)
    assert answers == 2 * num_whole
    assert counts == {"truncated_file": 1}
    byte = 2 + num_whole * (len(record) + 2)
    assert first["truncated_file"] == f"{path}, byte {byte}"
    assert f"ends too early, at byte {byte}: the file looks truncated" in stopped
    # In KiB. The limit that was asked for is 1.5 GB; the stream itself holds a block and a record.
    assert after < 1_500_000
    assert after - before < 100_000
