"""The one error that the commands show without a traceback."""


class UserError(Exception):
    """Something the user can mend: the message says what is wrong and what to do. Commands exit with 2."""
