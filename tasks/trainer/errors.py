"""The one exception that means "what you gave me is wrong"."""

from __future__ import annotations


class InputError(ValueError):
    """A user's input is wrong: a file, a config value, a model folder, a run directory.

    The message is one line that names the offending thing and the way out. The command line prints it alone,
    without a traceback, and exits with 2; every other exception is a fault of ours and keeps its traceback.
    """
