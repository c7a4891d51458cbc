"""The exceptions that are meant for people."""

from __future__ import annotations

import signal


class UserError(Exception):
    """Something the user can mend: a sentence with key, rule and value, shown without a traceback."""

    exit_code = 1


class Stopped(UserError):
    """The guard ended the run as it was told to; everything is saved."""

    exit_code = 3


class Signalled(Exception):
    """Raised inside the fit where a signal asked the run to stop and it can be continued exactly.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Interrupted(KeyboardInterrupt):
    """The run that stopped, seen from outside: no job of a sweep follows it.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
