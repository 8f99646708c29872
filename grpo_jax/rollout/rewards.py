"""Call rewards as TRL does, and stack their values; a failed reward is never silently 0.

A reward is a function ``reward(prompts, completions, **columns) -> list[float | None]`` (or an array), called flat.

None is a missing reward, and becomes NaN here. `training.estimators.make_objectives` keeps it. `core.advantages`
excludes it from GDPO's statistics, and replaces it by the group's mean in sums. A completion without any reward has
advantage 0 and counts in the loss's denominators; PPO masks it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, SupportsFloat

import numpy as np

from grpo_jax.config.copies import own_copy
from grpo_jax.config.fields import require
from grpo_jax.errors import UserError, failures_as, one_line
from grpo_jax.rollout.data import Row, as_chat_messages, map_pictures
from grpo_jax.rollout.env import Episode
from grpo_jax.rollout.pictures import open_picture
from grpo_jax.rollout.pipeline import set_current_judge
from grpo_jax.rollout.user_code import as_list, as_number, begin, reason_of

Reward = Callable[..., Any]
Columns = Mapping[str, Any]
"""Arguments of rewards by name, P·G values each: lists, or pictures as one tensor."""

PICTURES = ("images", "baseline_images")
"""Arguments of rewards with pictures; they stay on the scorer's device."""

MESSAGES = ("prompt_messages", "completion_messages")
"""Prompts and completions as chat messages."""

IS_CONVERSATION = "is_conversation"
"""Whether each prompt is a list of messages."""

WHERE_NAMED = (*MESSAGES, IS_CONVERSATION, "trainer_state", "log_metric", "log_extra")
"""Arguments that a reward gets only if it names them, not by ``**columns``."""


class TrainerState(NamedTuple):
    """Progress of a run."""

    global_step: int  # finished iterations; always `max_steps` for held-out prompts, so evaluations are comparable
    max_steps: int
    evaluation: bool  # whether these are held-out prompts


class JudgedBatch:
    """Progress of the run as the rewards of one batch see it, and the numbers that they log."""

    def __init__(self, iteration: int | None, max_steps: int):
        """Begin the batch of an iteration, from 0; None for held-out prompts."""
        self.state = TrainerState(max_steps if iteration is None else iteration, max_steps, iteration is None)
        self._values: dict[str, list[float]] = {}

    def log_metric(self, name: str, value: SupportsFloat) -> None:
        """Log a finite number for metrics.jsonl; those of held-out prompts are ignored."""
        number = float(value)
        if not self.state.evaluation and math.isfinite(number):
            self._values.setdefault(f"log/{name}", []).append(number)  # rewards may log from several threads

    @property
    def columns(self) -> Columns:
        """Return the arguments of the batch's rewards about the run."""
        return {"trainer_state": self.state, "log_metric": self.log_metric}

    @property
    def logged(self) -> dict[str, float]:
        """Return the means of the logged numbers, {"log/NAME": value}."""
        return {name: math.fsum(values) / len(values) for name, values in self._values.items()}


class ExtraColumns(dict[str, list[Any]]):
    """Columns that the rewards of some completions log for completions/, as in TRL."""

    def __init__(self, count: int):
        super().__init__()
        self._count = count

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Log a column: a value for each completion, a text, a number or None; others are written as texts."""
        listed = [value.item() if getattr(value, "shape", None) == () else value for value in values]
        if len(listed) != self._count:
            raise ValueError(f"log_extra({column!r}) needs {self._count} values, one a completion, got {len(listed)}")
        self[f"log/{column}"] = listed


class RewardError(UserError):
    """Failure of a reward. ``reward`` is its name; its exception is the cause."""

    def __init__(self, reward: str, reason: str):
        super().__init__(f"reward {one_line(reward, 60)}: {reason}")
        self.reward = reward


def collect_rewards(
    rewards: Mapping[str, Reward],
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Columns,
    group_size: int,
    *,
    on_error: Literal["raise", "missing"] = "raise",
) -> np.ndarray:
    """Call every reward once with P·G prompts, completions and values of each column; return f32 [P, G, N].

    Without ``**columns``, a function receives only its named arguments. `async def` rewards run concurrently, in the
    thread of `event_loop`. A reward fails if it raises (SystemExit too), returns the wrong number of values, or a value
    that is not a finite number. "raise" then raises RewardError; "missing" makes that value NaN, or all of them.
    `StopRun` always propagates.
    """
    count = len(completions)
    arguments = {"prompts": list(prompts), "completions": list(completions), **columns}
    lenient = on_error == "missing"
    forgiven = suppress(RewardError) if lenient else nullcontext()
    values = {name: np.full(count, np.nan) for name in rewards}
    waiting: dict[str, Future] = {}
    try:
        for name, function in rewards.items():
            with forgiven:
                returned = _call(function, name, arguments)
                if inspect.iscoroutine(returned):
                    waiting[name] = begin(returned)
                else:
                    values[name] = _read(returned, name, arguments["completions"], lenient=lenient)
        for name, future in waiting.items():
            with forgiven:
                values[name] = _read(future, name, arguments["completions"], lenient=lenient)
    finally:
        for future in waiting.values():
            future.cancel()
    stacked = np.array([*values.values()], np.float32).reshape(len(rewards), count)
    return stacked.T.reshape(count // group_size, group_size, len(rewards))


def _call(function: Reward, name: str, arguments: Columns) -> object:
    set_current_judge(f"reward {name}")
    with failures_as(lambda error: RewardError(name, reason_of(error))):
        shown = _in_messages(arguments, getattr(function, "reads_messages", False))
        # Each call gets its own values, so that a reward cannot change the input of another one, or the stored rows.
        return function(**own_copy(accepted_arguments(function, shown)))


def _in_messages(arguments: Columns, messages: bool | None) -> Columns:
    """Return arguments with prompts and completions in the form that `with_arguments` describes."""
    count = len(arguments["completions"])
    chosen = arguments.get(IS_CONVERSATION, [False] * count) if messages is None else [messages] * count
    if not any(chosen):
        return arguments
    forms = {}
    for name, chats in zip(("prompts", "completions"), MESSAGES, strict=True):
        values = zip(arguments[name], arguments[chats], chosen, strict=True)
        forms[name] = [chat if is_chat else text for text, chat, is_chat in values]
    return {**arguments, **forms}


def _read(returned: object, name: str, completions: list[str], *, lenient: bool) -> np.ndarray:
    """Convert a reward's result to f64 [count]; NaN for None and, if lenient, for a non-finite number."""
    set_current_judge(f"reward {name}")
    with failures_as(lambda error: RewardError(name, reason_of(error))):
        values = as_list(returned.result() if isinstance(returned, Future) else returned, len(completions))
    numbers = [as_number(value) for value in values]
    for i, (value, number) in enumerate(zip(values, numbers, strict=True)):
        if number is None and value is not None and not lenient:
            short = one_line(repr(value[:100]) if type(value) is str else value, 60)
            text = one_line(repr(completions[i][:40]), 50)
            reason = f"it returned {short} for completion {i} ({text}), not a finite number or None"
            failed = value if isinstance(value, BaseException) else None  # one episode failed
            raise RewardError(name, reason if failed is None else reason_of(failed)) from failed
    return np.array(numbers, np.float64)  # None is NaN


@dataclass(frozen=True)
class Score:
    """Judges the last completions of episodes by rewards and eval rewards.

    A reward may ask for "episodes", for token ids as "completion_ids", and for prompts and completions as chat
    messages. In single-turn tasks "place_in_group" numbers a group's completions from 0, so a reward can recognise
    groups.
    """

    rewards: Mapping[str, Reward]  # N functions by name
    eval_rewards: Mapping[str, Reward]  # W functions by name
    missing: bool  # a failing reward is missing; otherwise it raises
    required: Sequence[str] = ()  # columns that the rewards need; None where no row of a batch has one
    columns_of: Callable[[Sequence[str], Columns], Columns] | None = None  # as `TaskRewards.columns`
    tokenize: Callable[[str], list[int]] = lambda text: []  # encodes a completion that the policy did not generate
    role: str = "user"  # of observations in the messages of an episode

    def __call__(
        self,
        rows: Sequence[Row],
        episodes: Sequence[Sequence[Episode]],
        pictures: Any,
        *,
        tokens: Sequence[Sequence[list[int]]] | None = None,
        progress: Columns = MappingProxyType({}),
        missing: bool | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return rewards f32 [P, G, N] and eval rewards f32 [P, G, W] of episodes `[P][G]`; NaN is missing.

        `tokens` `[P][G]` are the policy's token ids, if it generated them, and `progress` arguments about the run.
        `missing` replaces the attribute, unless None.
        """
        group, judged = len(episodes[0]), [*itertools.chain.from_iterable(episodes)]
        completions = [episode.last.completion for episode in judged]
        prompts = [row.prompt for row in rows for _ in range(group)]
        columns = _row_columns(rows, group, self.required, drawn=pictures is not None)
        columns |= {"episodes": judged, **progress}
        columns |= {name: drawn for name in PICTURES if (drawn := getattr(pictures, name, None)) is not None}
        if all(episode.final and len(episode.turns) == 1 for episode in judged):  # others may lack their group
            columns["place_in_group"] = [*range(group)] * len(rows)
        ids = [[]] * len(judged) if tokens is None else itertools.chain.from_iterable(tokens)
        columns["completion_ids"] = [own or self.tokenize(text) for own, text in zip(ids, completions, strict=True)]
        columns[MESSAGES[1]] = [_episode_messages(episode, self.role) for episode in judged]
        if self.columns_of is not None:
            columns |= self.columns_of(completions, own_copy(columns))
        on_error = "missing" if (self.missing if missing is None else missing) else "raise"
        judge = functools.partial(collect_rewards, on_error=on_error)
        arguments = prompts, completions, columns, group
        return judge(self.rewards, *arguments), judge(self.eval_rewards, *arguments)


def _episode_messages(episode: Episode, role: str) -> list[dict[str, str]]:
    """Return the turns of an episode as chat messages, with the observations between them."""
    messages = []
    for turn in episode.turns:
        messages.append({"role": "assistant", "content": turn.completion})
        if turn.observation is not None:
            texts = turn.observation.messages or (turn.observation.text,)
            messages += [{"role": role, "content": text} for text in texts]
    return messages


def _row_columns(rows: Sequence[Row], group: int, required: Sequence[str], *, drawn: bool) -> dict[str, Any]:
    """Return the rows' columns, and those of their pictures and conversations, repeated for each completion."""
    names = dict.fromkeys([*required, *(name for row in rows for name in row.columns)])
    columns: dict[str, list[Any]] = {name: [row.columns.get(name) for row in rows] for name in names}
    columns[MESSAGES[0]] = [as_chat_messages(row) for row in rows]
    columns[IS_CONVERSATION] = [bool(row.messages) for row in rows]
    if any(row.pictures for row in rows):
        pictures = [map_pictures(row, open_picture) for row in rows]
        columns["pictures"] = pictures
        if not drawn:
            columns["images"] = pictures
            columns["image"] = [first[0] if first else None for first in pictures]
    if any(columns[IS_CONVERSATION]) and "messages" not in names:
        columns["messages"] = columns[MESSAGES[0]]
    return {name: [value for value in values for _ in range(group)] for name, values in columns.items()}


def accepted_arguments(function: Reward, arguments: Columns) -> dict[str, Any]:
    """Select the arguments a reward takes: all but `WHERE_NAMED` with ``**columns``, else only named arguments."""
    parameters = _parameters(function)
    names = {parameter.name for parameter in parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names |= arguments.keys() - {*WHERE_NAMED}
    return {name: value for name, value in arguments.items() if name in names}


def _parameters(function: Reward) -> list[inspect.Parameter]:
    """Return a function's parameters; ``**columns`` for a builtin without a signature."""
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]


def arguments_of(reward: Reward, *, required: bool = False) -> list[str]:
    """Return a reward's arguments that can be passed by name, or only those without a default."""
    named = [item for item in _parameters(reward) if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
    return [item.name for item in named if not required or item.default is item.empty]


def with_arguments(
    reward: Reward,
    options: Mapping[str, object],
    judges: Mapping[str, object] = MappingProxyType({}),
    *,
    messages: bool | None = False,
) -> Reward:
    """Bind options and judges among a reward's arguments; they shadow columns of the same name.

    With `messages` the reward gets chat messages as its prompts and completions; None: where the prompts are messages,
    as in TRL.
    """
    if not (options or judges) and messages is False:
        return reward

    @functools.wraps(reward)
    def bound(**arguments: Any) -> object:
        return reward(**{**arguments, **judges, **own_copy(options)})

    bound.reads_messages = messages  # type: ignore[attr-defined]
    return bound


def check_options(label: str, function: Reward, options: Mapping[str, object], other: Collection[str] = ()) -> None:
    """Refuse options that are neither named arguments of a function nor in `other`.

    ``**columns`` does not count: nearly every reward has it, and it would swallow a mistyped option.
    """
    names = [name for name in arguments_of(function) if name not in other]
    expected = f"arguments of the reward ({', '.join(names) or 'it has none'})"
    for option in options:
        require(option in names, f"rewards.{label}.options", expected, option)


def maximised_names(weights: Mapping[str, float]) -> list[str]:
    """Return the maximised rewards: those of non-zero weight, or all if every weight is 0."""
    return [name for name, weight in weights.items() if weight] or list(weights)


def join_names(names: Sequence[str]) -> str:
    """Join a few names, and count the others."""
    first = ", ".join(names[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
