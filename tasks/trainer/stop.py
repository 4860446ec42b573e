"""SIGTERM: drop what is being computed, save what is finished, say what is lost, exit 75; all within 15 seconds.

The handler itself saves, in the main thread between two bytecodes, and only then raises: what unwinding waits for (a
slow store, a thread that reads ahead) can no longer cost the checkpoint. State changes inside `held` blocks only, and
a stop waits for their end, so a half-made step never reaches a checkpoint. The price: a stop inside one long C++ call
waits for that call; a timer ends the process before the 15 seconds are over in any case.

A second SIGTERM ends the process at once. Free of torch.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

EXIT_INTERRUPTED = 75
# Prefect and Kubernetes kill 30 s after SIGTERM, the launcher 15 s after it; the last second is for saying so.
GRACE_SECONDS = 14.0

Handler = Callable[[float], BaseException]


class _Unwind(BaseException):
    """Carries the error out to `installed`: libraries between catch Exception, and retry OSError, which
    InterruptedError is."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class Stop:
    """What this process does when SIGTERM comes; one a process, for signals are the process's."""

    def __init__(self) -> None:
        self._act: Handler | None = None
        self._held = 0
        self._deadline: float | None = None
        self._error: BaseException | None = None

    @contextmanager
    def installed(self, act: Handler) -> Iterator[None]:
        """From now on SIGTERM calls `act(seconds left)`, in the main thread, and raises the error that it returns.

        Blocks nest: the inner one's act counts. Outside the main thread, where Python allows no handlers, this does
        nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        outer_act = self._act
        before = signal.getsignal(signal.SIGTERM)
        self._act = act
        signal.signal(signal.SIGTERM, self._on_signal)
        try:
            yield
        except _Unwind as unwind:
            raise unwind.error from None
        finally:
            signal.signal(signal.SIGTERM, before)
            self._act = outer_act
            if outer_act is None:
                # The caller lives on (a test, a flow in this process): the timer must not end it.
                self._deadline = self._error = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """State changes in here: a stop waits for the end of the block. After an error of the block, nothing is
        saved."""
        self._held += 1
        try:
            yield
        except BaseException:
            self._act = _abandoned
            raise
        finally:
            self._held -= 1
        if self._deadline is not None and not self._held:
            self._end()

    @property
    def asked(self) -> bool:
        """Whether SIGTERM came."""
        return self._deadline is not None

    @property
    def seconds_left(self) -> float:
        """Until this process ends whatever happens; the whole grace where SIGTERM came to another rank."""
        return GRACE_SECONDS if self._deadline is None else self._deadline - time.monotonic()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._deadline is not None:
            os._exit(EXIT_INTERRUPTED)
        self._deadline = time.monotonic() + GRACE_SECONDS
        threading.Thread(target=self._exit_at, args=(self._deadline,), daemon=True, name="stop").start()
        if not self._held:
            self._end()

    def _end(self) -> None:
        assert self._act is not None
        assert self._deadline is not None
        if self._error is None:
            self._error = self._act(self._deadline - time.monotonic())
        raise _Unwind(self._error)

    def _exit_at(self, deadline: float) -> None:
        time.sleep(max(0.0, deadline - time.monotonic()))
        if self._deadline == deadline:
            # In a thread of its own: whoever should read our output may not do so, and this must end all the same.
            word = threading.Thread(target=self._say, daemon=True)
            word.start()
            word.join(0.5)
            os._exit(EXIT_INTERRUPTED)

    def _say(self) -> None:
        logger.warning("%s", self._error or "stopped by SIGTERM before the work could be saved in time")
        sys.stdout.flush()


stop = Stop()


def _abandoned(seconds: float) -> BaseException:
    return InterruptedError("stopped by SIGTERM after an error; nothing was saved")


def interrupted(what: str) -> Handler:
    """For work that keeps what it finishes as it goes: nothing to save, one line to say."""
    return lambda seconds: InterruptedError(f"{what} was stopped by SIGTERM; start the run again to go on")
