"""The process that measures: it holds one case at a time and answers requests, JSON lines over stdin and stdout.

Started by path, `python worker.py --load MODULE_OR_FILE`, and imports nothing of ours: so the same code measures a peer
in an environment where our package named `kernels` is not importable and cannot hide theirs.

What is loaded offers

    open_case(settings, device) -> case            case.inputs: tensors that exist before; for the memory columns
                                                   case.start(variant) -> body: untimed preparation; body() is timed and
                                                   returns the tensors that the computation returns (gradients)
    error_of(variant, problem, device) -> float    relative L2 error on a small problem; None for what has none
    versions() -> dict of str                      more than torch's own; optional

Requests: {"do": "prepare", "settings"}, {"do": "run", "variant", "warm", "repeat", "trim"}, {"do": "error", "variant",
"problem"}, {"do": "release"}, {"do": "quit"}. A reply is one line; {"failed": traceback} for an exception,
{"oom": true} when the device's memory is exhausted.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO


class Worker:
    """Answers requests about one loaded module."""

    def __init__(self, module: Any, device: str) -> None:
        import torch

        self._torch = torch
        self._module = module
        self._device = torch.device(device)
        self._cuda = self._device.type == "cuda"
        if self._cuda and not torch.cuda.is_available():
            raise RuntimeError("there is no CUDA device")
        if self._cuda:
            torch.set_num_threads(1)  # as the trainer does: many threads wait for each other in small host operations
        self._case: Any = None

    def describe(self) -> dict[str, Any]:
        """What the results say about the machine."""
        torch = self._torch
        versions = {"torch": torch.__version__}
        if importlib.util.find_spec("triton"):
            versions["triton"] = importlib.import_module("triton").__version__
        if self._cuda:
            versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
        versions |= getattr(self._module, "versions", dict)()
        gpu = torch.cuda.get_device_name(self._device) if self._cuda else "cpu"
        return {"ready": True, "versions": versions, "gpu": gpu}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """One reply, whatever happens inside: the parent decides what an error means."""
        out_of_memory = self._torch.OutOfMemoryError
        try:
            reply: dict[str, Any] = getattr(self, f"_{request.pop('do')}")(**request)
        except out_of_memory:
            reply = {"oom": True}
        except Exception:  # noqa: BLE001 - the process must outlive it; the parent gets the traceback and stops
            reply = {"failed": traceback.format_exc()}
        if "oom" in reply:
            self._trim()  # after the except clause: the exception's frames held the tensors
        return reply

    def _prepare(self, settings: dict[str, Any]) -> dict[str, Any]:
        self._release()
        self._case = self._module.open_case(settings, self._device)
        gc.freeze()  # what is loaded by now stays: later collections look at the iterations' own objects only
        return {"input_bytes": _bytes_of(self._case.inputs)}

    def _release(self) -> dict[str, Any]:
        self._case = None
        gc.unfreeze()  # or what the last case leaves in cycles would keep its memory
        if self._cuda:  # what earlier cases' matrix products left behind would count as the next one's memory
            self._torch._C._cuda_clearCublasWorkspaces()
        self._trim()
        return {}

    def _error(self, variant: str, problem: dict[str, Any]) -> dict[str, Any]:
        error = self._module.error_of(variant, problem, self._device)
        self._trim()
        return {"error": error}

    def _run(self, variant: str, warm: int, repeat: int, trim: bool) -> dict[str, Any]:
        """repeat timed iterations after warm untimed ones; trim gives cached memory back to the other processes."""
        for _ in range(warm):
            self._once(variant)
        iterations = [self._once(variant) for _ in range(repeat)]
        if trim:
            self._trim()
        return {"iterations": iterations}

    def _once(self, variant: str) -> dict[str, Any]:
        body: Callable[[], Iterable[Any]] = self._case.start(variant)
        before = list(self._case.inputs)
        gc.collect()
        gc.disable()
        try:
            ms, returned, peak = self._timed(body)
        finally:
            gc.enable()
        inputs = {tensor.untyped_storage().data_ptr() for tensor in before}
        own = [tensor for tensor in returned if tensor.untyped_storage().data_ptr() not in inputs]
        extra = None if peak is None else peak - _bytes_of(before) - _bytes_of(own)
        return {"ms": ms, "peak_bytes": peak, "extra_bytes": extra}

    def _timed(self, body: Callable[[], Iterable[Any]]) -> tuple[float, list[Any], int | None]:
        if not self._cuda:
            started = time.perf_counter()
            returned = list(body())
            return (time.perf_counter() - started) * 1e3, returned, None
        cuda = self._torch.cuda
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        begin.record()
        returned = list(body())
        end.record()
        cuda.synchronize()
        return begin.elapsed_time(end), returned, cuda.max_memory_allocated()

    def _trim(self) -> None:
        gc.collect()
        if self._cuda:
            self._torch.cuda.empty_cache()


def _bytes_of(tensors: Iterable[Any]) -> int:
    """Bytes of the distinct storages."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def load(name: str) -> Any:
    """The module of a dotted name or of a .py file."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("eyas_bench_peer", name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve(requests: Iterable[str], replies: TextIO, loaded: str, device: str) -> None:
    """Answer until "quit" or the end of the requests. The first line says what was loaded, or why it failed."""

    def send(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    try:
        worker = Worker(load(loaded), device)
        send(worker.describe())
    except Exception:  # noqa: BLE001 - whatever a peer's import raises goes to the parent, which stops
        send({"failed": traceback.format_exc()})
        return
    for line in requests:
        request = json.loads(line)
        if request["do"] == "quit":
            return
        send(worker.answer(request))


def main() -> None:
    """Take the protocol's stdout away from the code that is measured: what it prints goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", required=True)
    parser.add_argument("--path", action="append", default=[])
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # The script's own folder comes first on the path, and would hide modules of the names that lie there.
    here = Path(__file__).resolve().parent
    sys.path[:] = arguments.path + [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    serve(sys.stdin, replies, arguments.load, arguments.device)


if __name__ == "__main__":
    main()
