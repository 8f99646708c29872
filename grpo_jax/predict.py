"""Rewrite prompts with a trained policy, as a function or a command.

    python -m grpo_jax.predict --run DIR --prompt "a huge crimson disc"

In Python: `grpo_jax.load_rewriter("runs/my_run")("What is this?", pictures=["cat.png"])`.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_jax.config.files import read_text
from grpo_jax.errors import UserError, command, exit_process, extras_named, run_parser

if TYPE_CHECKING:
    from grpo_jax.config.run import Config
    from grpo_jax.models.policy import Policy
    from grpo_jax.rollout.data import Row
    from grpo_jax.rollout.env import Turn
    from grpo_jax.sampling.decoding import Samples


@extras_named()
def load_rewriter(run_dir: str | Path, checkpoint: str = "final") -> Callable[..., str]:
    """Restore the policy of a run.

    Args:
        run_dir: Run directory of a training run.
        checkpoint: "final" (`policy/`, evaluated as "after" in summary.json), "best" (by the validation score, which
            may depend on few prompts, docs/runs.md), "latest", or a step.

    Returns:
        rewrite(prompt, pictures=()) → the greedy rewrite, or the prompt itself if the policy's answer is invalid.
        Pictures are a list, or one of them: paths, bytes, PIL images or arrays, as in a row of the data. With several
        turns the run's environment answers between them, and the last turn is returned.

    Raises:
        UserError: There is no such run or checkpoint, or a required package is missing.
    """
    from grpo_jax.runs.policy import restore_policy, run_config

    if run_config(run_dir).sampling.turns > 1:
        play = make_player(run_dir, checkpoint)
        return lambda prompt, pictures=(): play(prompt, pictures).completion
    config, policy, _ = restore_policy(run_dir, checkpoint, pictures=None)
    return make_rewriter(config, policy)


def make_player(run_dir: str | Path, checkpoint: str, exit_stack: ExitStack | None = None) -> Callable[..., Turn]:
    """Load a run with its environment and judges; return play(prompt, pictures=()) → its greedy episode's last turn."""
    from grpo_jax.runs.evaluation import InferenceSession

    session = InferenceSession(run_dir, lambda *_: None, exit_stack)

    def play(prompt: str, pictures: Sequence[object] = ()) -> Turn:
        if pictures:
            raise UserError("pictures: a run of several turns, or one that draws, takes prompts of text alone")
        return session.write(session.row(prompt, 1), checkpoint)[0].last

    return play


def make_rewriter(config: Config, policy: Policy, rows: Sequence[Row] = ()) -> Callable[..., str]:
    """Make the function of `load_rewriter` for a loaded policy.

    The longest of `rows`, which have no pictures, sets the width of all prompts, so that no prompt recompiles.
    """
    import jax

    from grpo_jax.rollout.encoding import choices_trie, make_decode, make_encode, policy_tokens
    from grpo_jax.rollout.prompts import read_prompt, take_pictures
    from grpo_jax.runs.policy import image_processor_of, make_see
    from grpo_jax.sampling.sampler import make_sampler
    from grpo_jax.sampling.samplers import named_ends, sampling_params

    loaded = policy.folder
    decode = make_decode(loaded.tokenizer, config.data, read=config.task.parser(config))
    keys = jax.random.split(jax.random.key(config.seed), 1)
    encoder = functools.partial(
        make_encode,
        loaded.tokenizer,
        config.data,
        pad_id=loaded.pad_id,
        vocab_size=loaded.config.vocab_size,
        image_processor=image_processor_of(config, loaded),
    )
    encode_wide = encoder(rows=rows) if rows else None

    @functools.cache  # choices are read on first use
    def sampler() -> Callable[..., Samples]:
        texts = config.task.choices(config)
        ends = named_ends(config.sampling, loaded, policy_tokens(config, loaded))
        return make_sampler(
            policy, sampling_params(config.sampling, 1, 0.0), **ends, trie=choices_trie(config, texts, loaded)
        )

    def rewrite(prompt: str, pictures: Sequence[object] = ()) -> str:
        try:
            row = read_prompt(prompt, take_pictures({"images": pictures}, None), None)
        except ValueError as error:
            raise UserError(str(error)) from error
        tokens, mask, pictures_read = (encode_wide or encoder(rows=[row]))([row])
        seen = {} if pictures_read is None else {"pictures": make_see(policy)(policy.variables, pictures_read)[0]}
        samples = jax.device_get(sampler()(policy.variables, tokens, mask, keys, **seen))
        return decode(samples.tokens[0, 0][samples.mask[0, 0]], row.prompt)[1].text

    return rewrite


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    description = "Print a policy's greedy answer to each prompt, or the prompt itself if the answer is invalid."
    parser = run_parser("predict", description)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", nargs="+", metavar="TEXT", help="Prompts; prints the answer to each as it is.")
    source.add_argument("--file", metavar="FILE", help="A prompt on each line; prints JSON, a line for each.")
    add, drawn = parser.add_argument, "Draw each answer too, with the run's renderer: FOLDER/0.png, …."
    add("--picture", nargs="+", default=[], metavar="FILE", help="Pictures of every prompt.")
    add("--json", action="store_true", help="Print JSON, a line for each prompt.")
    add("--pictures", type=Path, metavar="FOLDER", help=drawn)
    return parser


def _predict(options: argparse.Namespace) -> None:
    from grpo_jax.config.run import RENDERER
    from grpo_jax.rollout.records import RECORD_SUFFIXES
    from grpo_jax.runs.compile_cache import enable_compile_cache
    from grpo_jax.runs.policy import run_config

    if options.file is not None and Path(options.file).suffix.lower() in RECORD_SUFFIXES:
        raise UserError(f"--file: expected a text with a prompt on each line, got the records of {options.file}")
    config = run_config(options.run)
    if options.pictures is not None and RENDERER not in config.judges:
        raise UserError(f"--pictures: {options.run} has no renderer")
    if options.pictures is not None and options.pictures.is_file():
        raise UserError(f"--pictures: expected a folder, got {options.pictures}")
    prompts = options.prompt if options.file is None else [line for _, line in read_lines(options.file)]
    enable_compile_cache()
    with ExitStack() as exit_stack:
        named, plays = (options.run, options.checkpoint), options.pictures or config.sampling.turns > 1
        rewrite = make_player(*named, exit_stack) if plays else load_rewriter(*named)
        for number, prompt in enumerate(prompts):
            answer = rewrite(prompt, options.picture)
            text = answer if isinstance(answer, str) else answer.completion
            if options.pictures is not None and not isinstance(answer, str):
                _draw(answer, options.pictures / f"{number}.png")
            as_json = options.json or options.file is not None
            print(json.dumps({"prompt": prompt, "completion": text}, ensure_ascii=False) if as_json else text)


def _draw(turn: Turn, path: Path) -> None:
    """Write a turn's picture."""
    from grpo_jax.rollout.pictures import png

    if turn.image is None:
        raise UserError(f"--pictures: the renderer drew no picture of {turn.completion!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(turn.image))


def read_lines(path: str, option: str = "file") -> list[tuple[int, str]]:
    """Return the non-blank lines of an option's file, with their numbers from 1."""
    try:
        lines = read_text(path).replace("\r\n", "\n").split("\n")
    except UserError as error:
        raise UserError(f"--{option}: {error}") from error
    found = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found and option == "file":
        raise UserError(f"--file: {path}: expected at least one line")
    return found


main = command(make_parser, _predict)

if __name__ == "__main__":
    exit_process(main())
