"""The outcome of a fault, which every kind of fault in this folder yields."""

from typing import NamedTuple


class Outcome(NamedTuple):
    """One fault.

    Attributes:
        case: The fault, in a few words.
        handled: Whether the command did what it promises: at worst one clear line and exit code 2, no traceback,
            no hang, nothing lost that was saved.
        equal: Whether the run came out equal to one without the fault; None where there is nothing to compare.
        note: The observation, if it is not as promised.
    """

    case: str
    handled: bool
    equal: bool | None = None
    note: str = ""
