"""A page on this machine that asks a run: the rewrite of a prompt, its pictures and every judge's score.

    python -m grpo_jax.demo --run DIR [--checkpoint best] [--port 7860] [--save FOLDER]
    python -m grpo_jax.demo --run DIR --api

Beside the answer of one checkpoint stand the prompt as it was typed, drawn from the same noise, and another
checkpoint. A run that recommends shows the items for a history. The same is asked as JSON over HTTP (docs/demo.md).
"""

from __future__ import annotations

import argparse
import base64
import functools
import json
import math
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from grpo_jax.config.fields import require
from grpo_jax.errors import StageError, UserError, carry_out, leave, one_line, run_parser
from grpo_jax.recommend import SEPARATOR, ask_for, load_recommender, titles_of

if TYPE_CHECKING:
    from gradio import Blocks

    from grpo_jax.rollout.episodes import Episode
    from grpo_jax.runs.asking import Asker
    from grpo_jax.tasks.task import Say

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_EXAMPLES = 6
_NONE = "none"
_FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
_STYLE = """
:scope { background: none; }
.episodes { grid-template-columns: repeat(auto-fit, minmax(min(100%, 260px), 1fr)); align-items: start; }
.episode > h3 { margin: 0; color: var(--faint); }
.episode > .prompt:empty { display: none; }
.episode > img { width: 96px; height: auto; }
.turn > img { width: min(100%, 420px); height: auto; }
.turn { border-left: 0; padding-left: 0; margin: 4px 0; }
section { margin-top: 20px; }
h2, h3 { font-weight: 600; }
.scroll { max-height: none; }
.data th, .data td { border-width: 0 0 1px; }
.data td:not(.number) { min-width: 7em; }
"""


class Answer(NamedTuple):
    """What was asked and what came of it: HTML for the page, and JSON with pictures as PNG in base64."""

    html: str
    record: dict[str, Any]


class Question(NamedTuple):
    """How a run is asked.

    Attributes:
        text: Label of the text.
        number: Label of the number, its default and the least there is.
        examples: Texts and numbers to begin with.
        show: (text, number, names of checkpoints) → `Answer`.
        ask: (text, number, checkpoint) → JSON.
    """

    text: str
    number: tuple[str, int, int]
    examples: Sequence[Sequence[Any]]
    show: Callable[[str, int, Sequence[str]], Answer]
    ask: Callable[[str, int, str], dict[str, Any]]


def make_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = run_parser("demo", "Serves a page that asks a trained run, judges included, on this machine alone.")
    parser.add_argument("--beside", default="start", metavar="NAME", help="Checkpoint beside it (default: start).")
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on (default: %(default)s).")
    parser.add_argument("--port", type=int, default=7860, help="Port (default: %(default)s).")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="A button keeps pictures and scores there.")
    parser.add_argument("--api", action="store_true", help="Answer in JSON alone, without a page.")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return carry_out(make_parser, _serve, arguments)


def _serve(options: argparse.Namespace) -> None:
    from grpo_jax.runs.asking import checkpoint_names
    from grpo_jax.runs.compile_cache import enable_compile_cache

    names = checkpoint_names(options.run, options.checkpoint)
    if options.beside not in (*names, _NONE):
        raise UserError(f"--beside: expected one of {', '.join([*names, _NONE])}, got {options.beside}")
    _require_free(options.host, options.port)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio

    enable_compile_cache()
    with ExitStack() as leaving:
        question = make_question(options.run, lambda name, detail="": print(f"{name:<10} {detail}"), leaving)
        page = make_page(question, options, names)
        page.queue(default_concurrency_limit=1)
        page.launch(
            server_name=options.host,
            server_port=options.port,
            share=False,
            ssr_mode=False,
            quiet=True,
            prevent_thread_lock=True,
            show_error=True,
            footer_links=["api"],
            theme=gradio.themes.Base(font=_FONTS, font_mono=("ui-monospace", "Menlo", "monospace")),
        )
        leaving.callback(page.close, verbose=False)
        if options.host not in _LOOPBACK:
            print("note       whoever reaches this port may ask: there is no password")
        print(f"serving    http://{options.host}:{options.port}, until Ctrl-C", flush=True)
        threading.Event().wait()


def _require_free(host: str, port: int) -> None:
    """Raise UserError where nobody can listen, before anything is loaded."""
    require(0 < port < 2**16, "--port", "a number from 1 to 65535", port)
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise UserError(f"--port: cannot listen on {host}:{port} ({reason}); choose another") from error


def make_question(run: str, say: Say, leaving: ExitStack) -> Question:
    """Load a run, its judges included where texts are judged; `leaving` closes them."""
    from grpo_jax.runs.asking import Asker
    from grpo_jax.runs.policy import run_config

    if hasattr(run_config(run).task, "recommender"):
        return _of_recommender(run)
    return _of_writer(Asker(run, say, leaving))


def _of_writer(asker: Asker) -> Question:
    from grpo_jax.reports.page import render, section
    from grpo_jax.runs.asking import episode_record
    from grpo_jax.runs.results import shown_episode

    def show(prompt: str, seed: int, checkpoints: Sequence[str]) -> Answer:
        row, display = asker.row(prompt, seed), asker.parts.config.task.display
        greedy = {name: asker.write(row, name)[0] for name in checkpoints}
        plain = asker.unchanged(row)
        judged = {"the prompt as typed": plain, **greedy} if plain is not None else greedy
        entries = [shown_episode(row, one)._replace(title=name, prompt="") for name, one in judged.items()]
        sections: list[str] = [Markup("<p>{}</p>").format(_note(judged)), render("episodes", entries, display)]
        groups = {} if asker.draws else {name: asker.write(row, name, group=True) for name in checkpoints}
        for name, episodes in groups.items():
            rows = [[one.last.text, *one.last.rewards.values()] for one in episodes]
            table = render("table", ["completion", *episodes[0].last.rewards], rows)
            sections.append(section(f"A group of {name}, sampled as in training", table))
        record = {"prompt": prompt, "seed": seed} | {
            "answers": {name: episode_record(one) for name, one in judged.items()},
            "groups": {name: [*map(episode_record, episodes)] for name, episodes in groups.items()},
        }
        return Answer("".join(sections), record)

    examples = [[row.prompt, row.id] for row in asker.parts.test_rows[:_EXAMPLES]]
    number = ("Noise", examples[0][1] if examples else 1, 0)

    def ask(prompt: str, seed: int, checkpoint: str) -> dict[str, Any]:
        return episode_record(asker.write(asker.row(prompt, seed), checkpoint)[0])

    return Question("Prompt", number, examples, show, ask)


def _note(judged: Mapping[str, Episode]) -> str:
    notes = [
        f"{name}: the answer could not be read, and the prompt stands in its place."
        for name, episode in judged.items()
        if not episode.last.usable
    ]
    if any(math.isnan(score) for episode in judged.values() for score in episode.last.rewards.values()):
        notes.append("A score of – asks for a column of the data, which a typed prompt has not, or its judge failed.")
    return " ".join(notes)


def _of_recommender(run: str) -> Question:
    from grpo_jax.reports.page import render, section

    recommender = functools.lru_cache(2)(functools.partial(load_recommender, run))

    def ask(history: str, count: int, checkpoint: str) -> dict[str, Any]:
        titles = titles_of(history)
        if not titles:
            raise UserError(f"history: expected titles or ids with {SEPARATOR} between them, got none")
        return ask_for(recommender(checkpoint), count, titles)[1]

    def show(history: str, count: int, checkpoints: Sequence[str]) -> Answer:
        answers = {name: ask(history, count, name) for name in checkpoints}
        sections = [
            section(
                name,
                render(
                    "table",
                    ["item", "score", "shares", "taken with"],
                    [
                        [one["title"] or one["item"], one["score"], ", ".join(one["words"]), "; ".join(one["together"])]
                        for one in answer["items"]
                    ],
                ),
                answer.get("note", ""),
            )
            for name, answer in answers.items()
        ]
        return Answer("".join(sections), {"history": history, "answers": answers})

    return Question(f"History, titles with {SEPARATOR} between them", ("Items", 10, 1), [], show, ask)


def make_page(question: Question, options: argparse.Namespace, names: Sequence[str]) -> Blocks:
    """Make the page, and the call over HTTP; of --api that alone. One question at a time is answered."""
    import gradio

    policy = threading.Lock()  # a call over HTTP may pass by the queue

    def ask(prompt: str, seed: int = question.number[1], checkpoint: str = options.checkpoint) -> dict:
        try:
            with policy:
                return question.ask(prompt, int(seed), checkpoint)
        except (UserError, StageError) as error:
            raise gradio.Error(one_line(error, 300), print_exception=False) from error

    def show(prompt: str, seed: float | None, checkpoint: str, beside: str) -> tuple[str, str, dict | None]:
        checkpoints = list(dict.fromkeys(name for name in (checkpoint, beside) if name != _NONE))
        try:
            if seed is None:
                raise UserError(f"{question.number[0]}: expected a number")
            with policy:
                answer = question.show(prompt, int(seed), checkpoints)
        except (UserError, StageError) as error:
            return Markup('<p role="alert" style="color: #c33232">{}</p>').format(one_line(error, 300)), "", None
        return "", f'<div class="answer">{_scoped_style()}{answer.html}</div>', answer.record

    def keep(record: dict | None) -> str:
        if record is None:
            return Markup("<p>Ask first: there is nothing to save yet.</p>")
        return Markup("<p>Saved as {}</p>").format(save(options.save, record))

    with gradio.Blocks(title=f"grpo demo: {Path(options.run).name}", analytics_enabled=False) as page:
        gradio.api(ask, api_name="ask")
        if options.api:
            return page
        gradio.HTML(Markup("<h2>{}</h2>").format(Path(options.run).resolve().name))
        prompt = gradio.Textbox(label=question.text, lines=2, autofocus=True, elem_id="prompt")
        with gradio.Row():
            checkpoint = gradio.Dropdown(names, value=options.checkpoint, label="Checkpoint", min_width=140)
            beside = gradio.Dropdown([_NONE, *names], value=options.beside, label="Beside it", min_width=140)
            label, default, least = question.number
            number = gradio.Number(default, label=label, precision=0, minimum=least, min_width=140)
        with gradio.Row():
            button = gradio.Button("Ask", variant="primary", elem_id="ask")
            kept = gradio.Button("Save", elem_id="save", visible=options.save is not None)
        line = gradio.HTML(elem_id="line")
        shown = gradio.HTML(elem_id="shown", apply_default_css=False)
        record = gradio.State()
        if question.examples:
            gradio.Examples([*question.examples], [prompt, number], label="Held-out prompts, and their noise")
        asked = [prompt, number, checkpoint, beside]
        gradio.on([button.click, prompt.submit], show, asked, [line, shown, record], api_visibility="private")
        kept.click(keep, record, line, api_visibility="private")
    return page


def _scoped_style() -> str:
    """Return the style of report.html for an answer alone."""
    from grpo_jax.reports.page import style

    own = style().replace(":root", ":scope").replace("body {", ":scope {")
    return f"<style>@scope (.answer) {{ {own} {_STYLE} }}</style>"


def save(folder: Path, record: dict[str, Any]) -> Path:
    """Write an answer to a folder: N.json, and its pictures beside it as N_1.png, N_2.png, …; return the former."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.stem) for path in folder.glob("*.json") if path.stem.isdecimal()), default=0)
    pictures: list[str] = []

    def without_pictures(value: Any) -> Any:
        if isinstance(value, list):
            return [without_pictures(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        kept = {name: without_pictures(entry) for name, entry in value.items()}
        if kept.get("image") is not None:
            pictures.append(kept["image"])
            kept["image"] = f"{number}_{len(pictures)}.png"
        return kept

    text = json.dumps(without_pictures(record), indent=2, ensure_ascii=False)
    for place, picture in enumerate(pictures, 1):
        (folder / f"{number}_{place}.png").write_bytes(base64.b64decode(picture))
    path = folder / f"{number}.json"
    path.write_text(text + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    leave(main())
