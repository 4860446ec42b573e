"""A user's mistake, or a stop that was asked for, is one line in a flow's log; only faults of ours have a traceback."""

from __future__ import annotations

import logging

from storage.errors import StoreError
from tasks.trainer.errors import InputError


class _OneLine(logging.Filter):
    """Prefect logs every exception of a flow with its traceback; a user's mistake needs none."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], InputError | StoreError | InterruptedError):
            record.exc_info = None
            record.exc_text = None
        return True


_filter = _OneLine()


def log_mistakes_as_one_line() -> None:
    """From now on, in this process. Calling it again changes nothing."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_filter)
