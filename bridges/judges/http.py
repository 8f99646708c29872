"""A judge that answers over HTTP: batches as JSON, several at once, asked again where network or server fail."""

from __future__ import annotations

import json
import os
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from grpo_jax.config.files import parse_json
from grpo_jax.errors import UserError, one_line

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the second attempt, twice as long before each further one; and the most."""
PASSING = (408, 425, 429, 500, 502, 503, 504)
"""HTTP's status codes of what may be over in a moment."""
_LONGEST_ANSWER = 2**26  # bytes


class JudgeError(RuntimeError):
    """A judge that gave no scores, whatever was tried; says why in one line."""


class _PassingError(Exception):
    """An attempt that failed and may be made again; `asked` is the pause that the server asks for, in seconds."""

    def __init__(self, reason: str, asked: float = 0.0):
        super().__init__(reason)
        self.asked = asked


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Headers with a key in them go to the judge that was named, and to no other."""

    def redirect_request(self, *_: Any) -> None:
        """No other request: the answer that redirects is an error."""


class HttpJudge:
    """A judge behind an address, itself a reward.

    It is sent {"prompts": [...], "completions": [...], "columns": {name: [...]}} and answers {"scores": [...]}, a
    number or null for each completion.

    Attributes:
        name: The address without its query.
    """

    device = "cpu"

    def __init__(
        self,
        url: str,
        *,
        columns: Sequence[str] = (),
        headers: dict[str, str] | None = None,
        batch_size: int = 64,
        concurrency: int = 4,
        timeout: float = 60.0,
        attempts: int = 5,
        first_pause: float = FIRST_PAUSE,
    ):
        """As the fields of `bridges.scorers.http`; headers go with every request."""
        parts = urlsplit(url)
        self.name = f"{parts.scheme}://{parts.netloc}{parts.path}"
        self._url, self._columns, self._batch_size, self._concurrency = url, columns, batch_size, concurrency
        self._headers = {**(headers or {}), "Content-Type": "application/json"}
        self._timeout, self._attempts, self._first_pause = timeout, attempts, first_pause
        self._opener = urllib.request.build_opener(_NoRedirect)

    @property
    def summary(self) -> str:
        """One line for the opening of a run."""
        return f"{self.name}: {self._concurrency} requests at once, of {self._batch_size} completions"

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float | None]:
        """The reward: a score or None for each of B completions.

        Args:
            prompts: B texts.
            completions: B texts.
            **columns: B values each; those that the config names are sent.
        """
        if missing := [name for name in self._columns if name not in columns]:
            raise JudgeError(f"the data have no column {missing[0]}, which is to be sent")
        named = {name: columns[name] for name in self._columns}
        batches = [slice(start, start + self._batch_size) for start in range(0, len(completions), self._batch_size)]
        sent = [
            {
                "prompts": prompts[rows],
                "completions": completions[rows],
                "columns": {name: values[rows] for name, values in named.items()},
            }
            for rows in batches
        ]
        given_up = threading.Event()
        pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="http judge")
        try:
            asked = [pool.submit(self._ask, batch, given_up) for batch in sent]
            return [score for batch in asked for score in batch.result()]
        finally:
            given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, batch: dict[str, Any], given_up: threading.Event) -> list[float | None]:
        """One batch, asked until it is answered."""
        request, count = json.dumps(batch).encode(), len(batch["completions"])
        for attempt in range(self._attempts):
            try:
                return _scores(self._post(request), count)
            except _PassingError as error:
                reason, pause = str(error), pause_after(attempt, self._first_pause, error.asked)
            if attempt + 1 < self._attempts and given_up.wait(pause):
                break
        raise JudgeError(f"{reason}, {self._attempts} attempts, {self.name}")

    def _post(self, request: bytes) -> bytes:
        """One attempt: the answer's body."""
        try:
            asked = urllib.request.Request(self._url, request, self._headers, method="POST")
            with self._opener.open(asked, timeout=self._timeout) as answer:
                return answer.read(_LONGEST_ANSWER)
        except urllib.error.HTTPError as error:
            with error:
                reason = f"HTTP {error.code} {one_line(error.reason, 40)}"
                if error.code in PASSING:
                    raise _PassingError(reason, _seconds(error.headers.get("Retry-After"))) from error
            raise JudgeError(f"{reason}, {self.name}") from error
        except (OSError, HTTPException) as error:  # no connection, an answer that breaks off, or none in time
            reason = getattr(error, "reason", error)
            raise _PassingError(f"{type(reason).__name__}: {one_line(reason, 40)}") from error


def pause_after(attempt: int, first: float, asked: float) -> float:
    """Seconds between two attempts: doubled each time, varied so that many do not come back at once, none too early.

    Args:
        attempt: Counted from 0.
        first: What the first is doubled from.
        asked: The least, if the server says so.
    """
    grown = min(first * 2**attempt, LONGEST_PAUSE)
    return max(random.uniform(grown / 2, grown), min(asked, LONGEST_PAUSE))


def _seconds(text: str | None) -> float:
    """What Retry-After asks for; 0 where it is left out or names a date."""
    return float(text) if text and text.isdecimal() else 0.0


def _scores(answer: bytes, count: int) -> list[float | None]:
    """The scores of a batch."""
    try:
        scores = parse_json(answer)["scores"]
    except (ValueError, KeyError) as error:
        raise JudgeError(
            f'it answered no JSON {{"scores": [...]}} but {one_line(answer[:60].decode(errors="replace"), 40)}'
        ) from error
    if not isinstance(scores, list) or len(scores) != count:
        came = len(scores) if isinstance(scores, list) else type(scores).__name__
        raise JudgeError(f"it must answer one score for each of {count} completions, got {came}")
    return scores


def read_headers(variable: str) -> dict[str, str]:
    """The headers that an environment variable holds, one "Name: value" in a line; none where no variable is named.

    Raises:
        UserError: It is not set, or holds something else; what it holds is not said.
    """
    if not variable:
        return {}
    lines = [line for line in os.environ.get(variable, "").splitlines() if line.strip()]
    headers = {name.strip(): value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}
    if not lines or len(headers) != len(lines):
        raise UserError(f'headers_from: expected lines "Name: value" in the environment variable {variable}')
    return headers
