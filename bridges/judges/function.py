"""A user's reward function as a judge, so that it can run in a pool of Ray actors."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable

from grpo_jax.config.fields import Options, require
from grpo_jax.config.judge import Judge
from grpo_jax.config.named import fixed_options, load_object


class Function(Judge):
    """A reward function, for a pool of actors; its name is a reward."""

    name: str
    """Import path, package.module:function or file.py:function."""
    options: Options = {}
    """Keyword arguments of the function."""

    def check(self) -> None:
        """Refuse a missing object, one that is not callable, and options that it does not name."""
        self.load()

    def load(self, device: str = "cpu") -> Callable:
        """Return the function with its options, which shadow columns; it does not use the device."""
        function = load_object(self.name, "name")
        unknown = sorted(self.options.keys() - inspect.signature(function).parameters)
        require(not unknown, "options", f"arguments of {self.name}", unknown)
        options = fixed_options(function, self.options)
        reward = functools.wraps(function)(lambda *a, **columns: function(*a, **columns | copy.deepcopy(options)))
        reward.takes_messages = True  # type: ignore[attr-defined] like any reward of the user
        return reward
