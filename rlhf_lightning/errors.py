"""The exceptions that are meant for people."""


class UserError(Exception):
    """Something the user can mend: a sentence with key, rule and value, shown without a traceback."""

    exit_code = 1


class Stopped(UserError):
    """The guard ended the run as it was told to; everything is saved."""

    exit_code = 3
