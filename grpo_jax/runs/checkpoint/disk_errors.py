"""What Orbax and tensorstore raise where a disk refused them, told apart and in a few words."""

import errno
import os

from grpo_jax.errors import one_line


def is_disk_error(error: BaseException) -> bool:
    """Whether a write failed for the machine's reasons; tensorstore reports those as ValueError."""
    text = str(error)
    return isinstance(error, OSError) or "OS error" in text or "os_error_code" in text or "No space left" in text


def first_line(error: BaseException) -> str:
    """The system's own words for what happened, or the first of the error's."""
    text = str(error)
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO, errno.EFBIG, errno.ENOMEM):
        if os.strerror(code) in text:
            return os.strerror(code)
    return one_line(error, 80)
