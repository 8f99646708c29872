"""A remote judge over HTTP; examples/http_judge is a server.

    python -m grpo_jax.train --task text … --judges.brevity examples/judges/http.py:Http \
        --judges.brevity.url http://127.0.0.1:8000/score --rewards '[{"name": "brevity"}]'

Batches are sent as JSON, several at once, and retried after failures of network or server.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from urllib.parse import urlsplit

from grpo_jax.config.fields import Positive, PositiveCount, Words, require, resume_mutable
from grpo_jax.config.files import parse_json
from grpo_jax.config.judge import Judge
from grpo_jax.errors import UserError, one_line

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the second attempt, doubled before each further one, and their maximum."""
PASSING = (408, 425, 429, 500, 502, 503, 504)
"""HTTP status codes of transient failures."""
_LONGEST_ANSWER = 2**26  # maximum bytes of a response


class Http(Judge):
    """Score texts by a server over HTTP; the judge's name is a reward.

    The server gets {"prompts": [...], "completions": [...], "columns": {name: [...]}} and answers
    {"scores": [...]}, a number or null for each completion.
    """

    url: str = resume_mutable("")
    """Address that gets the batches by POST, http:// or https://."""
    columns: Words = []
    """Columns of the data to send with prompts and completions."""
    headers_from: str = resume_mutable("")
    """Environment variable with headers for every request, one "Name: value" per line, so that no config holds keys."""
    batch_size: PositiveCount = resume_mutable(64)
    """Completions per request."""
    concurrency: PositiveCount = resume_mutable(4)
    """Concurrent requests."""
    timeout: Positive = resume_mutable(60.0)
    """Time limit of a request in seconds."""
    attempts: PositiveCount = resume_mutable(5)
    """Attempts per request if the network or the server fails, with growing pauses."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        complete = parts.scheme in ("http", "https") and bool(parts.hostname)
        require(complete, "url", "http://HOST/… or https://HOST/…", self.url)
        require(parts.password is None, "url", "no password in it, but headers_from", f"{parts.scheme}://…")

    def check(self) -> None:
        """Refuse missing headers, without a request."""
        read_headers(self.headers_from)

    def memory(self) -> list[tuple[str, int, str]]:
        """Return nothing: the judge needs no memory on this machine."""
        return [("HTTP", 0, "runs elsewhere")]

    def __str__(self) -> str:
        return f"{_shown(self.url)}: {self.concurrency} requests at once, of {self.batch_size} completions"

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence) -> list[float | None]:
        """Return a score or None for each of B completions; send the config's columns, B values each."""
        missing = [name for name in self.columns if name not in columns]
        require(not missing, "columns", "columns of the data", missing)
        size = self.batch_size
        requests = []
        for rows in (slice(start, start + size) for start in range(0, len(completions), size)):
            sent = {name: columns[name][rows] for name in self.columns}
            requests.append({"prompts": prompts[rows], "completions": completions[rows], "columns": sent})
        stopped = threading.Event()
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="http judge")
        try:
            answers = [pool.submit(self._ask, request, stopped) for request in requests]
            return [score for answer in answers for score in answer.result()]
        finally:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, batch: dict[str, Sequence[str]], stopped: threading.Event) -> list[float | None]:
        """Send one batch, with retries."""
        request = json.dumps(batch).encode()
        for attempt in range(self.attempts):
            try:
                return _scores(self._post(request), len(batch["completions"]))
            except _PassingError as error:
                reason = str(error)
                backoff = min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE) * random.uniform(0.5, 1.0)
                pause = max(backoff, min(error.retry_after, LONGEST_PAUSE))
            if attempt + 1 < self.attempts and stopped.wait(pause):
                break
        raise JudgeError(f"{reason}, {self.attempts} attempts, {_shown(self.url)}")

    def _post(self, request: bytes) -> bytes:
        """Make one attempt; return the body of the response."""
        headers = {**read_headers(self.headers_from), "Content-Type": "application/json"}
        post = urllib.request.Request(self.url, request, headers, method="POST")
        body, seconds = b"", self.timeout
        deadline = time.monotonic() + seconds
        try:
            with urllib.request.build_opener(_NoRedirect).open(post, timeout=seconds) as answer:
                while len(body) < _LONGEST_ANSWER and (came := answer.read1(2**16)):
                    body += came
                    if time.monotonic() > deadline:
                        raise TimeoutError
                if answer.length and len(body) < _LONGEST_ANSWER:
                    raise HTTPException(f"the answer broke off {answer.length} bytes before its end")
                return body
        except urllib.error.HTTPError as error:
            with error:
                reason = f"HTTP {error.code} {one_line(error.reason, 40)}"
                if error.code in PASSING:
                    after = error.headers.get("Retry-After", "")  # dates are not supported
                    raise _PassingError(reason, float(after) if after.isdecimal() else 0.0) from error
            raise JudgeError(f"{reason}, {_shown(self.url)}") from error
        except (OSError, HTTPException) as error:  # no connection, an incomplete response, or a timeout
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise _PassingError(f"no whole answer within {seconds:g} s") from error
            raise _PassingError(f"{type(reason).__name__}: {one_line(reason, 80)}") from error


class JudgeError(RuntimeError):
    """A judge gave no scores after all attempts; the message is one line with the reason."""


class _PassingError(Exception):
    """A failed attempt that may be retried; `retry_after` is the server's request, in seconds."""

    def __init__(self, reason: str, retry_after: float = 0.0):
        super().__init__(reason)
        self.retry_after = retry_after


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuse redirects, so that headers with a key go only to the configured judge."""

    def redirect_request(self, *_: object) -> None:
        """Return no new request, so that a redirect is an error."""


def _shown(url: str) -> str:
    """Return an address without its query, which may contain a key."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def _scores(answer: bytes, count: int) -> list[float | None]:
    with suppress(ValueError, KeyError, TypeError):
        scores = parse_json(answer)["scores"]
        if isinstance(scores, list) and len(scores) == count:
            return scores
    came = one_line(answer[:60].decode(errors="replace"), 40)
    raise JudgeError(f'it must answer {{"scores": [...]}}, one for each of {count} completions, got {came}')


def read_headers(variable: str) -> dict[str, str]:
    """Read headers, one "Name: value" per line, from an environment variable; errors keep its value secret."""
    if not variable:
        return {}
    lines = [line for line in os.environ.get(variable, "").splitlines() if line.strip()]
    headers = {name.strip(): value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}
    if not lines or len(headers) != len(lines):
        raise UserError(f'headers_from: expected lines "Name: value" in the environment variable {variable}')
    return headers
