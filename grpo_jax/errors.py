"""The errors that the commands show without a traceback."""


class UserError(Exception):
    """Something the user can mend: the message says what is wrong and what to do. Commands exit with 2."""


class StopRun(UserError):
    """A judge is gone for good: the run saves and ends. Never turned into a missing reward."""
