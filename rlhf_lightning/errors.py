"""The one exception that is meant for people."""


class UserError(Exception):
    """Something the user can mend: one sentence that names the key, the rule and the value. Shown without a traceback."""
