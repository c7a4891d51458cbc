"""The one exception that is meant for people."""


class UserError(Exception):
    """Something the user can mend: a sentence with key, rule and value, shown without a traceback."""
