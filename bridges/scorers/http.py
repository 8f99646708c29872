"""A judge that runs elsewhere and is asked over HTTP; examples/http_judge is a server of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

from grpo_jax.config.fields import may_change, require


@dataclass(frozen=True)
class Http:
    """Judges texts by asking an address; named among the rewards, it is one.

    Args:
        url: Where batches are sent by POST, http:// or https://.
        columns: Columns of the data that are sent beside prompts and completions.
        headers_from: Environment variable with headers for every request, one "Name: value" in a line: keys stand in
            no config.
        batch_size: Completions of one request.
        concurrency: Requests that are on their way at once.
        timeout: Seconds that an answer may take.
        attempts: How often a request is made that the network or the server fails, with growing pauses between.
    """

    url: str = may_change("")
    columns: list[str] = field(default_factory=list)
    headers_from: str = may_change("")
    batch_size: int = may_change(64)
    concurrency: int = may_change(4)
    timeout: float = may_change(60.0)
    attempts: int = may_change(5)

    runs_on: ClassVar[str] = "cpu"
    """Where it is unless `devices` says otherwise: no card is kept for it."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        parts = urlsplit(self.url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
        require(known, "url", "http://HOST/… or https://HOST/…", self.url)
        require(parts.password is None, "url", "no password in it, but headers_from", f"{parts.scheme}://…")
        for name in ("batch_size", "concurrency", "attempts"):
            require(getattr(self, name) >= 1, name, "a number >= 1", getattr(self, name))
        require(self.timeout > 0, "timeout", "a number > 0", self.timeout)

    def check(self) -> None:
        """Refuses headers that are not there; nobody is asked."""
        from bridges.judges.http import read_headers

        read_headers(self.headers_from)

    def load(self, device: str) -> Any:
        """A `bridges.judges.http.HttpJudge`; the device is not its own."""
        from bridges.judges.http import HttpJudge, read_headers

        return HttpJudge(
            self.url,
            columns=self.columns,
            headers=read_headers(self.headers_from),
            batch_size=self.batch_size,
            concurrency=self.concurrency,
            timeout=self.timeout,
            attempts=self.attempts,
        )

    def memory(self) -> list[tuple[str, int, str]]:
        """None here."""
        return [("HTTP", 0, "runs elsewhere")]
