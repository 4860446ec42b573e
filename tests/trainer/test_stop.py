"""SIGTERM: when the state is saved, when it is not, and that the process ends in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tasks.trainer.stop import EXIT_INTERRUPTED, interrupted, stop


class Saves:
    """Counts the saves that a stop asks for."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.step = 0

    def __call__(self, seconds: float) -> InterruptedError:
        assert 0 < seconds < 15
        self.steps.append(self.step)
        return InterruptedError(f"saved {self.step}")


def send() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_state_changes_are_whole() -> None:
    """Red when a stop inside a state change saves half of it, or waits for more than its end."""
    saves = Saves()

    def work() -> None:
        for step in (1, 2, 3):
            with stop.held():
                if step == 2:
                    send()
                    assert saves.steps == []
                saves.step = step

    with pytest.raises(InterruptedError, match="saved 2"), stop.installed(saves):
        work()
    assert saves.steps == [2]


def test_a_stop_saves_before_it_unwinds_and_no_library_swallows_it() -> None:
    """Red when code between (a retry of OSError, say) catches the stop, or clean-up comes before the save."""
    saves, order = Saves(), []

    def work() -> None:
        try:
            send()
        except Exception:  # noqa: BLE001 - what libraries do
            pytest.fail("the stop was caught")
        finally:
            order.append(list(saves.steps))

    with pytest.raises(InterruptedError, match="saved 0"), stop.installed(saves):
        work()
    assert order == [[0]]


def test_an_error_in_a_state_change_is_never_saved() -> None:
    """Red when a stop after a failed update writes what the update left."""
    saves = Saves()

    def work() -> None:
        try:
            with stop.held():
                raise FloatingPointError
        except FloatingPointError:
            send()

    with pytest.raises(InterruptedError, match="nothing was saved"), stop.installed(saves):
        work()
    assert saves.steps == []


def test_blocks_nest_and_leave_the_process_as_it_was() -> None:
    """Red when the outer block's answer is lost after an inner one, or a handler stays."""
    before = signal.getsignal(signal.SIGTERM)
    outer, inner = Saves(), Saves()

    def work() -> None:
        with stop.installed(inner):
            pass
        send()

    with pytest.raises(InterruptedError), stop.installed(outer):
        work()
    assert (len(outer.steps), len(inner.steps)) == (1, 0)
    assert signal.getsignal(signal.SIGTERM) == before
    assert not stop.asked


def test_another_thread_installs_nothing() -> None:
    """Red when a flow that runs stages in threads fails for want of a handler."""
    entered = []

    def work() -> None:
        with stop.installed(interrupted("work")), stop.held():
            entered.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [True]


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that prints "ready" once its handler is there."""
    text = f"import time\nfrom tasks.trainer import stop as module\nfrom tasks.trainer.stop import *\n{code}"
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as it:
        assert it.stdout is not None
        assert it.stdout.readline() == "ready\n"
        yield it
        if it.poll() is None:
            it.kill()


def test_a_second_sigterm_ends_at_once() -> None:
    """Red when a save that hangs cannot be cut short."""
    code = """
def act(seconds):
    print("saving", flush=True)
    time.sleep(60)
with module.stop.installed(act):
    print("ready", flush=True)
    time.sleep(60)
"""
    with process(code) as running:
        running.terminate()
        assert running.stdout is not None
        assert running.stdout.readline() == "saving\n"
        running.terminate()
        assert running.wait(30) == EXIT_INTERRUPTED


def test_clean_up_that_hangs_does_not_hold_the_process() -> None:
    """Red when a slow store outlasts the 15 seconds, or the process ends without its last word."""
    code = """
module.GRACE_SECONDS = 0.5
with module.stop.installed(module.interrupted("the stage")):
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        time.sleep(60)
"""
    with process(code) as running:
        running.terminate()
        assert running.wait(30) == EXIT_INTERRUPTED
        assert running.stderr is not None
        assert "the stage was stopped by SIGTERM; start the run again" in running.stderr.read()
