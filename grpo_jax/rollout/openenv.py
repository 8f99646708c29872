"""OpenEnv servers as tool classes: `data.tools` "openenv:http://HOST:PORT" (extra `environments`).

Each episode is a session of the server, over a WebSocket. The schema of the server's action is the tool `step`.
"""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar
from urllib.parse import SplitResult, urlsplit

from grpo_jax.config.files import read_json
from grpo_jax.errors import UserError, one_line, short_repr
from grpo_jax.rollout.env import EnvError
from grpo_jax.rollout.user_code import begin

PREFIX = "openenv:"
_ATTEMPTS = 3  # to connect
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 60.0
_MALFORMED = (TypeError, KeyError, AttributeError)  # raised by an answer of another form
_OF_ACTIONS = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # errors that the policy reads; others end its episode


class OpenEnv:
    """A session of an OpenEnv server; `tool_class` makes a subclass with its address and its tool."""

    address: ClassVar[SplitResult]
    done = False
    _reward = 0.0
    _socket: Any = None

    async def reset(self, seed: int) -> str:
        """Open the session and begin an episode; return the text of its observation. EnvError if that fails."""
        self._socket = await _connect(self.address)
        weakref.finalize(self, _abandon, self._socket).atexit = False
        return await self._ask("reset", {"seed": seed})

    async def get_reward(self) -> float:
        """Return the sum of the steps' rewards."""
        return self._reward

    async def __aexit__(self, *error: object) -> None:
        """End the session."""
        if self._socket is not None:
            with suppress(Exception):
                await self._socket.close()

    async def _take(self, action: Mapping[str, Any]) -> str:
        """Take an action; return the text of the observation.

        Raises:
            RuntimeError: The server refuses the action; the policy reads why.
            EnvError: The server does not answer.
        """
        if self.done:
            raise RuntimeError("the episode is over")
        return await self._ask("step", action)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> str:
        from websockets.exceptions import ConnectionClosed, WebSocketException

        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                with suppress(ConnectionClosed):  # the reason of a refused session waits to be read
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                answer = read_json(await self._socket.recv())
            result = answer["data"]
            if answer["type"] == "error":
                raise _refusal(self.address, result)
            self.done, reward, observation = result["done"], result["reward"], result["observation"]
            self._reward += float(reward or 0)
            shown = {name: value for name, value in observation.items() if name != "metadata"}
        except (OSError, WebSocketException, ValueError, *_MALFORMED) as error:  # TimeoutError is an OSError
            reason = f"no answer in {_ANSWER_SECONDS:g} s" if isinstance(error, TimeoutError) else one_line(error)
            raise EnvError(f"{self.address.netloc}: {type(error).__name__}: {reason}") from error
        text, *others = shown.values() or ("",)
        return text if isinstance(text, str) and not others else json.dumps(shown, ensure_ascii=False)


def _refusal(address: SplitResult, result: Mapping[str, Any]) -> Exception:
    reason = one_line(f"{result['message']} {result.get('errors', '')}", 200)
    if result.get("code") in _OF_ACTIONS:
        return RuntimeError(reason)
    hint = "raise its max_concurrent_envs to training.prompts_per_batch × sampling.group_size"
    return EnvError(f"{address.netloc}: {reason}{f'; {hint}' if result.get('code') == 'CAPACITY_REACHED' else ''}")


def _abandon(socket: Any) -> None:
    """Close the session of an object that is no longer used."""
    with suppress(RuntimeError):
        begin(socket.close())


async def _connect(address: SplitResult) -> Any:
    from websockets.asyncio.client import connect
    from websockets.exceptions import WebSocketException

    class Connect(connect):
        def process_redirect(self, exc: Exception) -> Exception:
            return exc  # redirects are not followed

    url = address._replace(scheme=address.scheme.replace("http", "ws")).geturl()
    proxy = None if address.hostname in ("localhost", "127.0.0.1", "::1") else True
    for attempt in range(_ATTEMPTS):
        try:
            return await Connect(f"{url.rstrip('/')}/ws", open_timeout=_CONNECT_SECONDS, proxy=proxy)
        except (OSError, WebSocketException) as error:
            if attempt == _ATTEMPTS - 1:
                raise EnvError(f"{address.netloc}: no connection: {one_line(error)}") from error
            await asyncio.sleep(0.5 * 2**attempt)


@functools.cache
def tool_class(name: str) -> type[OpenEnv]:
    """Return the class of "openenv:http://HOST:PORT", whose `step` has the server's schema; raises UserError."""
    import websockets  # noqa: F401  # a missing package is named before anything is loaded

    address = urlsplit(name.removeprefix(PREFIX))
    if address.scheme not in ("http", "https") or not address.hostname or address.query or address.username:
        raise UserError(
            f"data.tools: expected openenv:http://HOST:PORT or openenv:https://HOST, got {short_repr(name)}"
        )
    try:
        schema = _read_schema(address)
        properties = {key: value for key, value in schema["properties"].items() if key != "metadata"}
    except (OSError, http.client.HTTPException, ValueError, *_MALFORMED) as error:
        wrong = f"no schema of an action at {address.netloc}/schema: {type(error).__name__}: {one_line(error)}"
        raise UserError(f"data.tools: {wrong}; is it an OpenEnv server, and does it run?") from error

    async def step(self: OpenEnv, **action: Any) -> str:
        return await self._take(action)

    about = schema.get("description") or "Take a step in the environment."
    parameters = {"type": "object", "properties": properties, "required": schema.get("required", [])}
    parameters |= {"$defs": schema["$defs"]} if "$defs" in schema else {}
    function = {"name": "step", "description": about, "parameters": parameters}
    step.tool_schema = {"type": "function", "function": function}  # pyright: ignore[reportFunctionMemberAccess]
    return type("OpenEnv", (OpenEnv,), {"address": address, "step": step})


def _read_schema(address: SplitResult) -> Mapping[str, Any]:
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.hostname or "", address.port, timeout=_CONNECT_SECONDS)
    try:
        connection.request("GET", f"{address.path.rstrip('/')}/schema")
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"HTTP {response.status}")
        return read_json(response.read(2**20).decode())["action"]
    finally:
        connection.close()
