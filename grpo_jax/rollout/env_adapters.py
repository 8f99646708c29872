"""Two adapters to an `Env`: for classes with `reset` and `step`, and for Python functions as tools.

The policy sees tools as JSON schemas, calls them in its completions, and reads their results as text. `data.tools`
names them by import path. A class among them is TRL's environment factory: each episode has one object, whose public
methods are tools. `reset(**row)` begins the episode and may add to its prompt; `get_reward()` may judge it.
"""

from __future__ import annotations

import asyncio
import copy
import datetime
import functools
import inspect
import json
import random
import re
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from grpo_jax.config.fields import require
from grpo_jax.config.named import GIVEN_TOOLS, IN_PYTHON, load_object
from grpo_jax.config.sections import TODAY, DataSection, RewardSection
from grpo_jax.errors import UserError, failures_as, is_own_doing, one_line, short_repr
from grpo_jax.models.hf.chat import PICTURE, Message
from grpo_jax.rollout.data import PICTURE_MARK, Row, as_chat_messages
from grpo_jax.rollout.env import Episode, Observation, Turn
from grpo_jax.rollout.pictures import Source
from grpo_jax.rollout.prompts import read_message
from grpo_jax.rollout.reward_registry import TaskRewards
from grpo_jax.rollout.rewards import BadReturn, Columns, accepted_arguments, as_number, finished


class Step(NamedTuple):
    """The result of a step; a class may return it as a plain tuple."""

    observation: str | Observation | None
    reward: float | None
    done: bool


class SingleEnv(Protocol):
    """One episode, made without arguments. Its seed must determine its prompt.

    Both methods may be `async def`.
    """

    def reset(self, seed: int) -> str | list[dict[str, Any]] | Awaitable[str | list[dict[str, Any]]]:
        """Begin the episode of a seed, and return its prompt: a string, or chat messages."""
        ...

    def step(self, text: str) -> tuple[str | Observation | None, float | None, bool] | Awaitable[tuple]:
        """Take a completion; return the observation, the reward (None for none), and whether the episode is done."""
        ...


Single = TypeVar("Single", bound=SingleEnv)
Start = tuple[str, int]
"""Kind of an episode's environment, and its seed."""


@dataclass
class _Play(Generic[Single]):
    """An episode's environment, once it is made, and the results of its steps so far."""

    environment: Single | None = None
    steps: list[Step | BaseException] = field(default_factory=list)


def _step(environment: SingleEnv, text: str, final: bool) -> object:
    return environment.step(text)


class EnvRunner(Generic[Single]):
    """Steps one environment for each episode of a rollout; `step` is an `Env`.

    The episode keeps its environment (`Episode.memory`), so that nothing is shared with another episode, iteration or
    evaluation. An environment that raises fails only its own episode: the exception replaces its observation and its
    reward.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Single]],
        seed: str = "seed",
        step: Callable[[Single, str, bool], object] = _step,
    ):
        """Take makers by kind, which is the rows' column "environment", and the name of the column of seeds.

        `step` takes an environment, a completion, and whether no further turn can follow it.
        """
        self._makers = makers
        self._seed = seed
        self._step = step
        self._prompts: dict[Start, str] = {}
        self._alone: tuple[object, list[Episode]] = (None, [])  # episodes of the last single turns

    def prompt(self, kind: str, seed: int, method: str) -> Any:
        """Return the prompt of a seed; UserError, which names the `method`, if reset fails."""

        def describe(error: BaseException) -> UserError:
            raised = f"raised {type(error).__name__}: {one_line(error, 100)}"
            return UserError(f"{method} {error if isinstance(error, BadReturn) else raised}")

        with failures_as(describe):
            prompt = finished(awaited(self._makers[kind]().reset(seed)))
        if isinstance(prompt, str):
            self._prompts[kind, seed] = prompt
        return prompt

    def step(self, rows: Sequence[Row], episodes: Sequence[Episode]) -> list[Observation | str | BaseException | None]:
        """Return the observation after each episode's last completion; None if it is done."""
        starts = [(row.columns["environment"], row.columns[self._seed]) for row in rows]
        steps = [play.steps[-1] for play in self._run_steps(starts, episodes)]
        return [step if isinstance(step, BaseException) else None if step.done else step.observation for step in steps]

    def reward(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> list[float | BaseException | None]:
        """Return the environment's reward of each last completion, without earlier turns."""
        steps = [play.steps[-1] for play in self._run_steps(*self._episodes(completions, **columns))]
        return [step if isinstance(step, BaseException) else step.reward for step in steps]

    def rewards(self, kinds: Sequence[str]) -> TaskRewards:
        """Return the reward of these kinds of environment, and one for each if there are several."""
        if not kinds:
            return TaskRewards()
        alone = {f"reward_{kind}": functools.partial(self._reward_of, kind) for kind in kinds} if len(kinds) > 1 else {}
        return TaskRewards(
            {"reward": self.reward, **alone}, defaults=(RewardSection(name="reward"),), eval_always=tuple(alone)
        )

    def _reward_of(
        self, kind: str, prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> list[float | BaseException | None]:
        values = self.reward(prompts, completions, **columns)
        return [value if own == kind else None for value, own in zip(values, columns["environment"], strict=True)]

    def environments(self, completions: Sequence[str], **columns: Any) -> list[Single | None]:
        """Return each episode's environment after its last completion; None if it could not be made."""
        return [play.environment for play in self._run_steps(*self._episodes(completions, **columns))]

    def _episodes(
        self, completions: Sequence[str], episodes: Sequence[Episode] | None = None, **columns: Any
    ) -> tuple[list[Start], Sequence[Episode]]:
        """Return the start of each episode, and the episodes; several rewards of single turns share them."""
        starts = [*zip(columns["environment"], columns[self._seed], strict=True)]
        if episodes is None:
            judged, episodes = self._alone
            if judged != (starts, completions):
                episodes = [Episode((Turn(text),), final=True) for text in completions]
                self._alone = (starts, completions), episodes
        return starts, episodes

    def _run_steps(self, starts: Sequence[Start], episodes: Sequence[Episode]) -> list[_Play[Single]]:
        """Step each episode's environment up to its last completion."""

        async def run_all() -> list[_Play[Single]]:
            return await asyncio.gather(*map(self._run_episode, starts, episodes))

        return finished(run_all())

    async def _run_episode(self, start: Start, episode: Episode) -> _Play[Single]:
        play: Any = episode.memory.setdefault(self, _Play())
        texts = episode.completions
        for text in texts[len(play.steps) :]:
            if play.steps and isinstance(play.steps[-1], BaseException):
                break
            final = episode.final and len(play.steps) + 1 == len(texts)
            try:
                if play.environment is None:
                    play.environment = self._makers[start[0]]()
                    self._check_prompt(start, await awaited(play.environment.reset(start[1])))
                step = _checked(await awaited(self._step(play.environment, text, final)))
            except BaseException as error:
                if not is_own_doing(error):
                    raise
                step = error
            play.steps.append(step)
        return play

    def _check_prompt(self, start: Start, prompt: object) -> None:
        """Raise BadReturn if the text of an episode's reset is not the one that the policy reads."""
        shown = self._prompts.get(start, prompt)
        if isinstance(prompt, str) and shown != prompt:
            raise BadReturn(
                f"reset of {start[0]} returned {one_line(shown, 60)!r} for the prompt and {one_line(prompt, 60)!r} for "
                "an episode of it: it must depend on its arguments and on Python's random alone"
            )


async def awaited(returned: Any) -> Any:
    """Return a function's result, awaited if it is a coroutine."""
    return await returned if inspect.isawaitable(returned) else returned


def _checked(returned: object) -> Step:
    """Return the result of a step; BadReturn unless it is (observation, reward, done)."""
    observation, reward, done = returned if isinstance(returned, tuple) and len(returned) == 3 else (None, None, False)
    number = None if reward is None else as_number(reward)
    if (observation is None and not done) or (number is None and reward is not None):
        expected = "(observation, reward, done), the reward finite or None, the observation no None unless it is done"
        raise BadReturn(f"step must return {expected}, got {one_line(repr(returned), 60)}")
    return Step(observation, number, bool(done))


_RESERVED = ("reset", "get_reward")  # methods that are not tools
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
# Only an object with arguments is a call; an object truncated before them may be one.
_ARGUMENTS = r'(?:"(?:arguments|parameters)".*|"\w*)'
_BARE = re.compile(rf'\s*(?:<\|python_tag\|>)?\s*(\{{\s*"name"\s*:\s*"[^"]*"\s*,\s*{_ARGUMENTS})', re.DOTALL)
_FORM = '{"name": …, "arguments": {…}}'
_TOO_LONG = "error: the result is too long to be read"
_ID = "row_id"  # column that identifies a row's episodes


class Call(NamedTuple):
    """A tool call in a completion: name and arguments, or its problem."""

    name: str = ""
    arguments: Mapping[str, Any] = {}
    problem: str = ""


def calls_in(text: str) -> list[Call]:
    """Return the tool calls of a completion, after its reasoning; without any it is a final answer.

    They have Qwen's form, <tool_call>{"name": …, "arguments": {…}}</tool_call>, or Llama's, a completion that consists
    of objects {"name": …, "parameters": {…}}. A malformed call has a `problem`.
    """
    text = text.rpartition("</think>")[2]
    written = _TAGGED.findall(text)
    bare = None if written else _BARE.fullmatch(text)
    return [_read(one) for one in (_objects(bare[1]) if bare else written)]


def _objects(text: str) -> Iterator[str]:
    """Split concatenated JSON objects; the last one may be malformed."""
    decoder = json.JSONDecoder()
    while text.startswith("{"):
        try:
            end = decoder.raw_decode(text)[1]
        except (ValueError, RecursionError):
            end = len(text)
        yield text[:end]
        text = text[end:].lstrip("; ,\n")


def _read(written: str) -> Call:
    try:
        call = json.loads(written)
        if not (isinstance(call, Mapping) and isinstance(call.get("name"), str)):
            return Call(problem=f"expected {_FORM}")
        arguments = call.get("arguments", call.get("parameters")) or {}
        if isinstance(arguments, str):  # some models write the object as a string
            arguments = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        return Call(problem=f"a call must be JSON, {_FORM}: {one_line(error, 80)}")
    if not isinstance(arguments, Mapping):
        return Call(problem=f"arguments must be an object, {_FORM}")
    return Call(call["name"], arguments)


class Toolbox:
    """Tools by name.

    Attributes:
        schemas: JSON schemas for the chat template.
        make: Makes an episode's object, whose methods are also tools; None if all tools are functions.
        made: The name of that object's class.
        judges: Whether that object has `get_reward`.
        each_turn: Whether its class sets `reward_each_turn`, so that `get_reward` is called after each turn.
    """

    def __init__(self, paths: Sequence[str], tools: Sequence[Any]):
        """Take functions and at most one class, with their import paths from the config."""
        self.schemas: list[Mapping[str, Any]] = []
        self.make: Callable[[], Any] | None = None
        self.made = ""
        self.judges = self.each_turn = False
        self._functions: dict[str, Callable[..., Any]] = {}
        self._methods: dict[str, Callable[..., Any]] = {}
        for path, tool in zip(paths, tools, strict=True):
            inner = tool.func if isinstance(tool, functools.partial) else tool
            if inspect.isclass(inner) and self.make is None:
                self._add_class(path, tool)
            elif not inspect.isclass(inner) and callable(inner) and hasattr(inner, "__name__"):
                self._add(path, tool, tool, self._functions)
            else:
                raise UserError(f"data.tools: expected functions, and one class at most, got {path}")

    def _add_class(self, path: str, make: Callable[[], Any]) -> None:
        def describe(error: BaseException) -> UserError:
            return UserError(
                f"data.tools: {path} is made without arguments, which raised {type(error).__name__}: "
                f"{one_line(error, 100)}; give its arguments defaults, or name a functools.partial of it"
            )

        with failures_as(describe):
            example = make()
        kind = type(example)
        for name in dir(kind):
            member, shown = inspect.getattr_static(kind, name), getattr(kind, name)
            if name in _RESERVED or name.startswith("_"):
                continue
            if isinstance(member, staticmethod | classmethod):
                self._add(f"{path}.{name}", shown, shown, self._functions)
            elif inspect.isfunction(member):
                self._add(f"{path}.{name}", getattr(example, name), member, self._methods)
        self.make, self.made, self.judges = make, kind.__name__, hasattr(example, "get_reward")
        self.each_turn = bool(getattr(example, "reward_each_turn", False))

    def _add(self, path: str, shown: Any, called: Callable[..., Any], among: dict[str, Callable[..., Any]]) -> None:
        from pydantic import PydanticUserError, validate_call

        try:
            schema = _schema(shown)
        except Exception as error:  # several types are possible
            raise UserError(f"data.tools: {path}: {one_line(error, 150)}") from error
        name = schema["function"]["name"]
        if name in self._functions | self._methods:
            raise UserError(f"data.tools: expected different names, got {name} twice")
        self.schemas.append(schema)
        try:
            among[name] = validate_call(called)
        except PydanticUserError:  # pydantic does not know these annotations
            among[name] = called

    async def call(self, text: str, environment: object = None) -> Observation | None:
        """Run the tool calls of a completion, with its episode's object; None without a call."""
        results = [await self._result(call, environment) for call in calls_in(text)]
        return Observation("\n".join(results), messages=tuple(results), otherwise=_TOO_LONG) if results else None

    async def _result(self, call: Call, environment: object) -> str:
        try:
            if call.problem:
                text = f"error: {call.problem}"
            elif call.name in self._methods:
                text = str(await awaited(self._methods[call.name](environment, **call.arguments)))
            elif call.name in self._functions:
                text = str(await awaited(self._functions[call.name](**call.arguments)))
            else:
                text = f"error: no tool {call.name[:40]!r}, there are {', '.join(self._functions | self._methods)}"
        except BaseException as error:
            if not is_own_doing(error):
                raise
            text = f"error: {_reason(error)}"
        return text.replace("\0", "\ufffd").encode(errors="replace").decode()  # arguments may hold NUL or surrogates

    def step(self, rows: Sequence[Row], episodes: Sequence[Episode]) -> list[Observation | None]:
        """Run the tool calls of each episode's last completion; an `Env` if all tools are functions."""

        async def observations() -> list[Observation | None]:
            return await asyncio.gather(*(self.call(episode.last.completion) for episode in episodes))

        return finished(observations())


def _reason(error: BaseException) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:4])
    return one_line(error, 200) or type(error).__name__


def _schema(tool: Any) -> Mapping[str, Any]:
    """Return a function's JSON schema, without positional-only arguments and those set by a partial."""
    from transformers.utils import get_json_schema

    function = tool.func if isinstance(tool, functools.partial) else tool
    schema = get_json_schema(function)
    parameters = inspect.signature(function).parameters
    hidden = {name for name, one in parameters.items() if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    if function is not tool:
        hidden |= {*tool.keywords, *[*parameters][: len(tool.args)]}
    shown = schema["function"]["parameters"]
    shown["properties"] = {name: one for name, one in shown["properties"].items() if name not in hidden}
    if "required" in shown:
        shown["required"] = [name for name in shown["required"] if name not in hidden]
    return schema


def toolbox(names: Sequence[str]) -> Toolbox:
    """Return the tools of these names; UserError for an object that cannot be a tool."""
    return _toolbox(tuple(names), tuple(map(_loaded, names)))


_toolbox = functools.lru_cache(maxsize=8)(Toolbox)


def _loaded(name: str) -> Any:
    if not name.startswith(IN_PYTHON):
        return load_object(name, "tool")
    if name not in GIVEN_TOOLS:
        label, _, number = name.rpartition(":")[2].partition("#")
        which = f"{label} (object {number} of that name)" if number else label
        raise UserError(
            f"data.tools: {which} was given in Python and nothing here can import it: call make_config(data={{'tools': "
            f"[{label}]}}, …) again, for all configs of its script in order, or keep it in a module"
        )
    return GIVEN_TOOLS[name]


def toolboxes(section: DataSection) -> dict[str, Toolbox]:
    """Return the tools of each class that rows choose, by name; else all tools, under ""; nothing without any."""
    classes = section.tool_classes
    functions = section.tool_names[: len(section.tool_names) - len(classes)]
    if not classes:
        return {"": toolbox(functions)} if functions else {}
    boxes = {name: toolbox((*functions, path)) for name, path in classes.items()}
    for name, box in boxes.items():
        require(box.make is not None, f"data.tools.{name}", "a class", classes[name])
    return boxes


def template_options(section: DataSection, environment: str | None = None) -> dict[str, Any]:
    """Return the options of the chat template for rows of an environment; None for all tools."""
    options = {"enable_thinking": False, **section.chat_template_options}
    if TODAY in options:
        options[TODAY] = datetime.date.fromisoformat(options[TODAY])
    boxes = toolboxes(section)
    chosen = [*boxes.values()] if environment is None else [boxes[environment]]
    schemas = [*section.tool_schemas, *(schema for box in chosen for schema in box.schemas)]
    different = [schema for place, schema in enumerate(schemas) if schema not in schemas[:place]]
    return options | ({"tools": different} if different else {})


@types.coroutine
def _seeded(seed: int, begin: Coroutine[Any, Any, object]) -> Generator[Any, Any, Any]:
    """Await a coroutine; while it runs, Python's `random` has a state of this seed."""
    state, resume, value = random.Random(seed).getstate(), begin.send, None
    while True:
        others = random.getstate()
        random.setstate(state)
        try:
            waited = resume(value)
        except StopIteration as end:
            return end.value
        finally:
            state = random.getstate()
            random.setstate(others)
        try:
            resume, value = begin.send, (yield waited)
        except BaseException as error:
            resume, value = begin.throw, error


class ToolEpisode:
    """An episode with a tool object, as an environment with `reset` and `step`."""

    def __init__(self, tools: Toolbox, rows: Mapping[int, Columns]):
        self._tools, self._rows = tools, rows
        self.object: Any = None

    async def reset(self, seed: int) -> str | list[Any]:
        """Begin the episode of a row with columns of its own; return the text or content parts for its prompt.

        The seed also seeds Python's `random`, so that the object can be made again.
        """
        assert self._tools.make is not None
        self.object = self._tools.make()
        columns = copy.deepcopy(accepted_arguments(self.object.reset, self._rows.get(seed, {})))

        async def begin() -> object:
            return await awaited(self.object.reset(**columns))

        content = await _seeded(seed, begin())
        if content is None or isinstance(content, str):
            return content or ""
        parts, sources = _read_content(content)
        return content if sources else "".join(parts)

    async def step(self, text: str, final: bool) -> tuple[Observation | None, float | None, bool]:
        """Run the tool calls of a completion; without a call the episode ends.

        `get_reward` is called at the episode's end, also if this turn is `final`, or after each turn if the class says
        so.
        """
        observation = await self._tools.call(text, self.object)
        done = observation is None
        judged = self._tools.judges and (done or final or self._tools.each_turn)
        return observation, await awaited(self.object.get_reward()) if judged else None, done


def _read_content(content: object) -> tuple[tuple[Any, ...], list[Source]]:
    """Return the parts of a reset's content, texts and `PICTURE`, and the sources of its pictures."""
    sources: list[Source | None] = []
    try:
        if not isinstance(content, list | tuple):
            raise ValueError(f"got {one_line(content, 60)}")
        parts = read_message({"role": "user", "content": content}, sources, None).parts
        if None in sources:
            raise ValueError('a part of type "image" needs its picture, as in {"type": "image", "image": …}')
    except ValueError as error:
        raise BadReturn(f"must return a text, a list of content parts, or None: {error}") from error
    return parts, sources


class ToolEpisodes:
    """Episodes of tool classes: prompts, observations, rewards."""

    def __init__(self, boxes: Mapping[str, Toolbox], *, by_row: bool = False):
        """Take tools with a class by name; with `by_row` the rows' column "environment" chooses."""
        self._rows: dict[int, Columns] = {}
        self._by_row = by_row
        self.boxes = boxes
        makers = {name: functools.partial(ToolEpisode, box, self._rows) for name, box in boxes.items()}
        self.runner = EnvRunner(makers, seed=_ID, step=ToolEpisode.step)

    def rewards(self) -> TaskRewards:
        """Return the reward of the classes with `get_reward`, and the column `environments`."""
        judged = self.runner.rewards([name for name, box in self.boxes.items() if box.judges])
        return replace(judged, columns=self.environments, column_names=("environments",))

    def start_episode(self, row: Row) -> Row:
        """Return a row whose prompt ends with the text and the pictures of its object's `reset`."""
        kind = self._kind_of(row)
        columns = {name: value for name, value in row.columns.items() if name != "environment"}
        self._rows[row.id] = {**columns, "prompt": as_chat_messages(row) if row.messages else row.prompt}
        content = self._reset(kind, row.id)
        parts, sources = ((content,), []) if isinstance(content, str) else _read_content(content)
        messages, mark, start = row.messages, PICTURE_MARK, ""
        if messages and content:
            messages, mark = (*messages[:-1], Message(messages[-1].role, (*messages[-1].parts, *parts))), ""
        elif sources and mark not in row.prompt:
            start = mark * len(row.pictures)
        return replace(
            row,
            prompt="".join([start, row.prompt, *(mark if part is PICTURE else part for part in parts)]),
            messages=messages,
            pictures=(*row.pictures, *sources),
            columns={**columns, "environment": kind, _ID: row.id},
        )

    def _kind_of(self, row: Row) -> str:
        """Return the name of a row's class; UserError for another name, or for a column that tools use."""
        chosen = row.columns.get("environment")
        if self._by_row and chosen not in [*self.boxes]:
            expected = f"one of {', '.join(self.boxes)}, the classes in data.tools"
            raise UserError(f"row {row.id}: column 'environment': expected {expected}, got {short_repr(chosen)}")
        for name in (_ID, "environments", *(() if self._by_row else ("environment",))):
            if name in row.columns:
                raise UserError(f"row {row.id}: column {name!r} is a name that tools use: rename it")
        return str(chosen) if self._by_row else next(iter(self.boxes))

    def make_row(self, number: int) -> dict[str, object]:
        """Return a row whose prompt is the content of its object's `reset`; UserError if that fails or is empty."""
        (kind,) = self.boxes
        content = self._reset(kind, number)
        if not content or (isinstance(content, str) and not content.strip()):
            raise UserError(
                f"data.tools: {kind}.reset returned no text for a prompt: let it return one, or name a file of prompts "
                "in data.prompts"
            )
        prompt = content if isinstance(content, str) else [{"role": "user", "content": content}]
        return {"prompt": prompt, "environment": kind, _ID: number}

    def _reset(self, kind: str, number: int) -> str | list[Any]:
        return self.runner.prompt(kind, number, f"data.tools: {kind}.reset")

    def environments(self, completions: Sequence[str], columns: Columns) -> Columns:
        """Return the column `environments`: the object of each episode, for rewards."""
        episodes = self.runner.environments(completions, **columns)
        return {"environments": [episode and episode.object for episode in episodes]}
