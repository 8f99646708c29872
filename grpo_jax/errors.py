"""The errors that the commands show without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {
    **dict.fromkeys(("torch", "torchvision", "diffusers", "open_clip", "accelerate", "PIL"), "diffusion"),
    **dict.fromkeys(("sklearn", "ray", "sentence_transformers"), "recommendation"),
    **dict.fromkeys(("gymnax", "six"), "cartpole"),
    **dict.fromkeys(("tensorboard", "wandb"), "logging"),
    "qwix": "quantised",
}
"""The extra that brings a module which is imported only where it is needed."""


class UserError(Exception):
    """Something the user can mend: the message says what is wrong and what to do. Commands exit with 2."""


class StopRun(UserError):
    """A judge is gone for good: the run saves and ends. Never turned into a missing reward."""


@contextmanager
def extras_named() -> Iterator[None]:
    """Says which extra brings a module that an import inside did not find; a decorator too.

    Raises:
        UserError: A module of `EXTRAS` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise UserError(f'{error.name} is not installed; run pip install "grpo_jax[{EXTRAS[error.name]}]"') from error
