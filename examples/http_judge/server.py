"""A judge behind HTTP, for `examples/judges/http.py`, with Python's own server.

    python examples/http_judge/server.py 8000
    python -m grpo_jax.train --task text … --judges.brevity examples/judges/http.py:Http \
        --judges.brevity.url http://127.0.0.1:8000/score --rewards '[{"name": "brevity"}]'

A request has prompts, completions and the columns that the config names. The answer has a score for each completion,
null for none. Put your own model into `score`.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def score(prompts: list[str], completions: list[str], **columns: list) -> list[float | None]:
    """Return a higher score for shorter completions; None for an empty one."""
    return [1 - len(c) / max(len(p), 1) if c else None for p, c in zip(prompts, completions, strict=True)]


class Judge(BaseHTTPRequestHandler):
    """Answer each POST with the scores of its batch, in a thread of its own for concurrent requests."""

    def do_POST(self) -> None:
        """Answer {"prompts", "completions", "columns"} with {"scores"}."""
        try:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = 200, {"scores": score(asked["prompts"], asked["completions"], **asked["columns"])}
        except (KeyError, TypeError, ValueError) as error:
            status, answer = 400, {"error": str(error)}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Judge).serve_forever()
