"""A local web page for a trained run: the rewrite of a prompt, its pictures and every judge's score.

    python -m grpo_jax.demo --run DIR [--checkpoint best] [--port 7860]

It compares a checkpoint's answer with the unchanged prompt, rendered from the same noise, and with another checkpoint.
For runs that recommend use `grpo recommend`.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from grpo_jax.errors import StageError, UserError, command, exit_process, one_line, run_parser

if TYPE_CHECKING:
    from gradio import Blocks

    from grpo_jax.rollout.env import Episode
    from grpo_jax.runs.evaluation import InferenceSession

_HOST = "127.0.0.1"
_NONE = "none"
_LARGEST = 2**20  # maximum bytes of a request
_STYLE = """
:scope { background: none; }
.entries { grid-template-columns: repeat(auto-fit, minmax(min(100%, 260px), 1fr)); align-items: start; }
.entry > .prompt:empty { display: none; }
.turn > img { width: min(100%, 420px); height: auto; }
.turn { border-left: 0; padding-left: 0; margin: 4px 0; }
"""


class Guard:
    """ASGI middleware that refuses uploads and long requests: any page in the browser can post to this machine."""

    def __init__(self, app: Callable):
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Callable, send: Callable) -> None:
        """Answer 413, or pass the request on."""
        headers = dict(scope.get("headers", ()))
        size = headers.get(b"content-length", b"0")
        chunked = b"transfer-encoding" in headers
        upload = "/upload" in scope.get("path", "")
        if scope["type"] == "http" and (upload or chunked or not size.isdigit() or int(size) > _LARGEST):
            await send({"type": "http.response.start", "status": 413, "headers": []})
            await send({"type": "http.response.body", "body": b"too large, or an upload: nothing is taken"})
            return
        await self._app(scope, receive, send)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = run_parser("demo", "Serve a demo page for a trained run and its judges, on this machine only.")
    parser.add_argument("--beside", default="start", metavar="NAME", help="Second checkpoint (default: start).")
    parser.add_argument("--port", type=int, default=7860, help="Port (default: %(default)s).")
    return parser


def _serve(options: argparse.Namespace) -> None:
    from grpo_jax.runs.compile_cache import enable_compile_cache
    from grpo_jax.runs.evaluation import InferenceSession, checkpoint_names
    from grpo_jax.runs.policy import run_config

    names = checkpoint_names(options.run, options.checkpoint)
    if options.beside not in (*names, _NONE):
        raise UserError(f"--beside: expected one of {', '.join([*names, _NONE])}, got {options.beside}")
    if hasattr(run_config(options.run).task, "recommender"):
        raise UserError("--run: a run that recommends is asked with `grpo recommend`")
    _require_free(options.port)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    enable_compile_cache()
    with ExitStack() as exit_stack:
        session = InferenceSession(options.run, lambda name, detail="": print(f"{name:<10} {detail}"), exit_stack)
        page = make_page(session, options, names)
        page.queue(default_concurrency_limit=1)
        # The Host header detects DNS rebinding by a page elsewhere.
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[_HOST, "localhost"])
        page.launch(
            server_name=_HOST,
            server_port=options.port,
            share=False,
            ssr_mode=False,
            quiet=True,
            prevent_thread_lock=True,
            show_error=True,
            footer_links=[],
            theme=gradio.themes.Base(font=("system-ui", "sans-serif"), font_mono=("monospace",)),  # none is fetched
            max_file_size=1,
            app_kwargs={"middleware": [hosts, Middleware(Guard)]},
        )
        exit_stack.callback(page.close, verbose=False)
        print(f"serving    http://{_HOST}:{options.port}, until Ctrl-C", flush=True)
        threading.Event().wait()


def _require_free(port: int) -> None:
    """Raise UserError if the port cannot be opened, before anything is loaded."""
    if not 0 < port < 2**16:
        raise UserError(f"--port: expected a number from 1 to 65535, got {port}")
    try:
        socket.create_server((_HOST, port)).close()
    except OSError as error:
        raise UserError(f"--port: cannot listen on {_HOST}:{port} ({one_line(error)}); choose another") from error


def answer(session: InferenceSession, prompt: str, seed: int, checkpoints: Sequence[str]) -> str:
    """Return the checkpoints' answers to a prompt as HTML; without a renderer, a group of each."""
    from grpo_jax.reports.page import render
    from grpo_jax.runs.results import shown_episode

    row, display = session.row(prompt, seed), session.ctx.config.task.display
    greedy = {name: session.write(row, name)[0] for name in checkpoints}
    plain = session.unchanged(row)
    judged = {"the prompt as typed": plain, **greedy} if plain is not None else greedy
    entries = [shown_episode(row, one)._replace(title=name, prompt="") for name, one in judged.items()]
    sections: list[str] = [Markup("<p>{}</p>").format(_note(judged)), render("shown_episodes", entries, display)]
    for name in () if session.ctx.fns.render else checkpoints:
        episodes = session.write(row, name, group=True)
        rows = [[one.last.completion, *one.last.rewards.values()] for one in episodes]
        title = f"A group of {name}, sampled as in training"
        sections.append(render("table", title, ["completion", *episodes[0].last.rewards], rows))
    return "".join(sections)


def _note(judged: Mapping[str, Episode]) -> str:
    notes = [
        f"{name}: the answer could not be read, and the prompt stands in its place."
        for name, episode in judged.items()
        if not episode.last.valid
    ]
    if any(math.isnan(score) for episode in judged.values() for score in episode.last.rewards.values()):
        notes.append("A score of – means that the reward needs a column of the data, or that its judge failed.")
    return " ".join(notes)


def make_page(session: InferenceSession, options: argparse.Namespace, names: Sequence[str]) -> Blocks:
    """Make the page; it answers one request at a time."""
    import gradio

    from grpo_jax.reports.page import style

    examples = [[row.prompt, row.id] for row in session.ctx.test_rows[:6]]
    own = style().replace(":root", ":scope").replace("body {", ":scope {")
    scoped = f"<style>@scope (.answer) {{ {own} {_STYLE} }}</style>"

    def show(prompt: str, seed: float | None, checkpoint: str, beside: str) -> tuple[str, str]:
        checkpoints = list(dict.fromkeys(name for name in (checkpoint, beside) if name != _NONE))
        try:
            if seed is None:
                raise UserError("noise: expected a number")
            sections = answer(session, prompt, int(seed), checkpoints)
        except (UserError, StageError) as error:
            return Markup('<p role="alert" style="color: #c33232">{}</p>').format(one_line(error, 300)), ""
        return "", f'<div class="answer">{scoped}{sections}</div>'

    with gradio.Blocks(title=f"grpo demo: {Path(options.run).name}", analytics_enabled=False) as page:
        gradio.HTML(Markup("<h2>{}</h2>").format(Path(options.run).resolve().name))
        prompt = gradio.Textbox(label="Prompt", lines=2, autofocus=True, elem_id="prompt")
        with gradio.Row():
            checkpoint = gradio.Dropdown(names, value=options.checkpoint, label="Checkpoint", min_width=140)
            beside = gradio.Dropdown([_NONE, *names], value=options.beside, label="Beside it", min_width=140)
            number = gradio.Number(
                examples[0][1] if examples else 1, label="Noise", precision=0, minimum=0, min_width=140
            )
        button = gradio.Button("Ask", variant="primary", elem_id="ask")
        line = gradio.HTML(elem_id="line")
        shown = gradio.HTML(elem_id="shown", apply_default_css=False)
        if examples:
            gradio.Examples(examples, [prompt, number], label="Held-out prompts, and their noise")
        asked = [prompt, number, checkpoint, beside]
        gradio.on([button.click, prompt.submit], show, asked, [line, shown], api_visibility="private")
    return page


main = command(make_parser, _serve)

if __name__ == "__main__":
    exit_process(main())
