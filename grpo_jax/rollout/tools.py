"""Python functions, and the methods of a class, as tools that the policy calls.

The policy sees tools as JSON schemas, calls them in its completions, and reads their results as text. `data.tools`
names them by import path. A class among them is TRL's environment factory (`rollout.env_adapters`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from grpo_jax.config.copies import own_copy
from grpo_jax.config.fields import require
from grpo_jax.config.named import GIVEN_TOOLS, IN_PYTHON, load_object
from grpo_jax.config.sections import DataSection
from grpo_jax.errors import UserError, failures_as, one_line, raised_by_user_code
from grpo_jax.models.hf.chat import Tokenizer, written_call
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.env import EnvError, Episode, Observation
from grpo_jax.rollout.openenv import PREFIX, tool_class
from grpo_jax.rollout.pictures import Source
from grpo_jax.rollout.prompts import read_content
from grpo_jax.rollout.rewards import Columns, accepted_arguments, arguments_of
from grpo_jax.rollout.user_code import BadReturn, all_finished, call_async

_RESERVED = ("reset", "get_reward")  # methods that are not tools
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
# Only an object with arguments is a call; an object truncated before them may be one.
_ARGUMENTS = r'(?:"(?:arguments|parameters)".*|"\w*)'
_BARE = re.compile(rf'\s*(?:<\|python_tag\|>)?\s*(\{{\s*"name"\s*:\s*"[^"]*"\s*,\s*{_ARGUMENTS})', re.DOTALL)
_FORM = '{"name": …, "arguments": {…}}'
ERROR = "error:"
"""Begins the result of a call that failed."""
_TOO_LONG = f"{ERROR} the result is too long to be read"


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
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    calls = _TAGGED.findall(text)
    bare = None if calls else _BARE.fullmatch(text)
    return [_read_call(call) for call in (_objects(bare[1]) if bare else calls)]


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


def _read_call(text: str) -> Call:
    try:
        call = json.loads(text)
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


def unread_call(tokenizer: Tokenizer, switches: Mapping[str, Any]) -> str:
    """Return a call as the chat template writes it, if `calls_in` does not read that form; "" if it does."""
    form = written_call(tokenizer, "look_up", switches)
    return "" if calls_in(form) == [Call("look_up")] else form


class Toolbox:
    """Tools by name."""

    def __init__(self, paths: Sequence[str], tools: Sequence[Any]):
        """Take functions and at most one class, with their import paths from the config."""
        self.schemas: list[Mapping[str, Any]] = []  # for the chat template
        # makes an episode's object, whose methods are also tools; None if all tools are functions
        self.make: Callable[[], Any] | None = None
        self.kind: type = object  # class of that object
        self._tools: dict[str, Callable[..., Any]] = {}
        self._methods: set[str] = set()  # names of the tools that take the object first
        for path, tool in zip(paths, tools, strict=True):
            inner = tool.func if isinstance(tool, functools.partial) else tool
            if inspect.isclass(inner) and self.make is None:
                self._add_class(path, tool)
            elif not inspect.isclass(inner) and callable(inner) and hasattr(inner, "__name__"):
                self._add(path, tool)
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
        self.make, self.kind = make, type(example)
        for name in dir(self.kind):
            member = inspect.getattr_static(self.kind, name)
            if name in _RESERVED or name.startswith("_"):
                continue
            if isinstance(member, staticmethod | classmethod):
                self._add(f"{path}.{name}", getattr(self.kind, name))
            elif inspect.isfunction(member):
                self._add(f"{path}.{name}", getattr(example, name), method=member)

    def _add(self, path: str, tool: Callable[..., Any], method: Callable[..., Any] | None = None) -> None:
        from pydantic import PydanticUserError, validate_call

        try:
            schema = getattr(tool, "tool_schema", None) or _schema(tool)
        except Exception as error:  # several types are possible
            raise UserError(f"data.tools: {path}: {one_line(error, 150)}") from error
        if (name := schema["function"]["name"]) in self._tools:
            raise UserError(f"data.tools: expected different names, got {name} twice")
        self.schemas.append(schema)
        self._methods.update([name] if method else [])
        self._tools[name] = method or tool
        with suppress(PydanticUserError):  # pydantic does not know these annotations
            self._tools[name] = validate_call(method or tool)

    async def call(self, text: str, environment: object = None) -> Observation | None:
        """Run the tool calls of a completion, with its episode's object; None without a call."""
        results = [await self._result(call, environment) for call in calls_in(text)]
        texts = tuple(text for text, _ in results)
        pictures = tuple(picture for _, shown in results for picture in shown)
        return Observation("\n".join(texts), pictures, messages=texts, otherwise=_TOO_LONG) if results else None

    async def _result(self, call: Call, environment: object) -> tuple[str, list[Source]]:
        """Return the text and the pictures of a call's result."""
        pictures: list[Source] = []
        try:
            if call.problem:
                text = f"{ERROR} {call.problem}"
            elif call.name in self._tools:
                own = (environment,) if call.name in self._methods else ()
                text, pictures = _shown(await call_async(self._tools[call.name], *own, **call.arguments))
            else:
                text = f"{ERROR} no tool {call.name[:40]!r}, there are {', '.join(self._tools)}"
        except BaseException as error:
            if isinstance(error, EnvError) or not raised_by_user_code(error):
                raise
            text = f"{ERROR} {_reason(error)}"
        return text.replace("\0", "\ufffd").encode(errors="replace").decode(), pictures  # it may hold surrogates

    def step(self, rows: Sequence[Row], episodes: Sequence[Episode]) -> list[Observation | None]:
        """Run the tool calls of each episode's last completion; an `Env` if all tools are functions."""
        return all_finished(self.call(episode.last.completion) for episode in episodes)


def _shown(result: object) -> tuple[str, list[Source]]:
    """Return a result's text and copies of its pictures; a list of content parts holds both, as in TRL."""
    parts = result if isinstance(result, list) else []
    if not parts or not all(isinstance(part, Mapping) and part.get("type") in ("text", "image") for part in parts):
        return str(result), []
    content, pictures = read_content(parts)
    return "".join(part for part in content if isinstance(part, str)), own_copy(pictures)


def _reason(error: BaseException) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:4])
    return one_line(error, 200) or type(error).__name__


def _schema(tool: Any) -> Mapping[str, Any]:
    """Return a function's JSON schema, without *arguments, **arguments, and those set by a partial."""
    from transformers.utils import get_json_schema

    function, fixed = (tool.func, tool.keywords) if isinstance(tool, functools.partial) else (tool, {})
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError("it yields; let it return its result, which the policy reads as text")
    schema = get_json_schema(function)
    parameters = inspect.signature(tool).parameters.values()
    names = {item.name for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)} - {*fixed}
    shown = schema["function"]["parameters"]
    shown["properties"] = {name: one for name, one in shown["properties"].items() if name in names}
    if "required" in shown:
        shown["required"] = [name for name in shown["required"] if name in names]
    return schema


def toolbox(names: Sequence[str]) -> Toolbox:
    """Return the tools of these names; UserError for an object that cannot be a tool."""
    return _toolbox(tuple(names), tuple(map(_load_tool, names)))


_toolbox = functools.lru_cache(maxsize=8)(Toolbox)


def _load_tool(name: str) -> Any:
    if name in GIVEN_TOOLS:
        return GIVEN_TOOLS[name]
    if not name.startswith(IN_PYTHON):
        return tool_class(name) if name.startswith(PREFIX) else load_object(name, "tool")
    label, _, number = name.rpartition(":")[2].partition("#")
    which = f"{label} (object {number} of that name)" if number else label
    raise UserError(
        f"data.tools: {which} was given in Python and nothing here can import it: call make_config(data={{'tools': "
        f"[{label}]}}, …) again, for all configs of its script in order, or keep it in a module"
    )


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


class ToolEpisode:
    """An episode with a tool object, as an environment with `reset` and `step`."""

    def __init__(self, tools: Toolbox, rows: Mapping[int, Columns]):
        self._tools, self._rows = tools, rows
        self.object: Any = None

    async def reset(self, seed: int) -> str | list[Any]:
        """Begin the episode of a row with columns of its own; return the text or content parts for its prompt.

        A required argument `seed` that is no column is the seed. It also seeds Python's `random`, for `__init__` too,
        but not for an `async def`: several of them run at a time.
        """

        def begin() -> object:
            assert self._tools.make is not None
            state = random.getstate()
            random.seed(seed)
            try:
                self.object = self._tools.make()
                columns = copy.deepcopy(accepted_arguments(self.object.reset, self._rows.get(seed, {})))
                if "seed" in arguments_of(self.object.reset, required=True):
                    columns.setdefault("seed", seed)
                return self.object.reset(**columns)
            finally:
                random.setstate(state)

        content: Any = "" if (returned := await call_async(begin)) is None else returned
        try:
            parts, sources = read_content(content)
        except ValueError as error:
            raise BadReturn(f"must return a text, a list of content parts, or None: {error}") from error
        return content if sources else "".join(map(str, parts))

    async def step(self, text: str, final: bool) -> tuple[Observation | None, float | None, bool]:
        """Run the tool calls of a completion; the episode ends without a call, or once the object's `done` is true.

        `get_reward` is called at the episode's end, also if this turn is `final`, or after each turn if the class says
        so; `__aexit__` follows at the end.
        """
        observation = await self._tools.call(text, self.object)
        ended = "done" in dir(self.object) and self.object.done
        done = observation is None or bool(ended and not callable(ended))  # a tool may have that name
        judged = done or final or getattr(self.object, "reward_each_turn", False)
        reward = await call_async(self.object.get_reward) if judged and hasattr(self.object, "get_reward") else None
        if done or final:
            await self._leave()
        return observation, reward, done

    async def first_prompt(self, seed: int) -> str | list[Any]:
        """Return the text of `reset`, and leave the episode."""
        try:
            return await self.reset(seed)
        finally:
            await self._leave()

    async def _leave(self) -> None:
        if hasattr(self.object, "__aexit__"):
            await self.object.__aexit__(None, None, None)
