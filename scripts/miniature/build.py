"""Build and measure the miniature, from the root of the repository.

    python -m scripts.miniature.build all|PART   trains into bridges/miniature/weights
    python -m scripts.miniature.build check      measures it, writes figures.json

--out FOLDER builds and measures there instead. --steps and --prompts make a trial, which is refused for the package's
own weights. Seeds are fixed. Renderer and scorer may train at the same time, in two processes of one thread each. On
two busy cores they took 45 and 31 minutes, the policy 7, the one with pictures 12 (about half on idle cores). The
parts of the harder world take 11 minutes of one core together; its renderer starts from the first world's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bridges import miniature
from bridges.miniature import scenes, world
from grpo_jax.errors import UserError, run_cli
from scripts.miniature import drawing, speech, speech_scenes

if TYPE_CHECKING:
    from bridges.diffusion import Renderer

WEIGHTS = Path(miniature.__file__).parent / "weights"
_PROMPTS, _RENDER_STEPS, _SEED = 256, 4, 11


def build(parts: Sequence[str], folder: Path, steps: int | None = None) -> None:
    """Train parts into folders of their names.

    Args:
        parts: Some of `miniature.PARTS`, in this order.
        folder: Folder to write.
        steps: Updates of each part; None for as many as the package's weights took.
    """
    # All are imported before the first is trained: what is missing must not show an hour later.
    trainers = [importlib.import_module(f"scripts.miniature.train_{part}") for part in parts]
    length = {} if steps is None else {"steps": steps}
    for part, trainer in zip(parts, trainers, strict=True):
        trainer.train(folder / part, **length)


def greedy_rewrites(folder: Path, prompts: list[str]) -> list[str]:
    """Return the greedy texts of the policy in ``folder``, through transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        for text in prompts
    ]
    batch = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    written = model.generate(**batch, max_new_tokens=16, do_sample=False)
    answers = tokenizer.batch_decode(written[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    return [answer.strip() for answer in answers]


def _checker_figures(count: int) -> dict[str, float]:
    """How well the checker reads true pictures, by attribute."""
    rng = np.random.default_rng(_SEED)
    rows = speech.sample_indices(rng, count)
    right = world.read(drawing.draw(rows, rng)) == rows
    figures = dict(zip(world.ATTRIBUTES, right.mean(0).round(4).tolist(), strict=True))
    return {"all": round(float(right.mean()), 4), **figures}


def _measure(texts: list[str], rows: list[dict], draw: Callable, score: Callable) -> dict:
    """Pixel accuracy, by attribute too, and mean CLIP score of the pictures of ``texts``."""
    pictures = draw(texts)
    requested = [row["requested"] for row in rows]
    figures = {"pixel_accuracy": float(world.pixel_accuracy(pictures.numpy(), requested).mean())}
    for name in world.ATTRIBUTES:
        asked = [i for i, wanted in enumerate(requested) if name in wanted]
        if not asked:  # among few prompts
            continue
        only = [{name: requested[i][name]} for i in asked]
        figures[name] = float(world.pixel_accuracy(pictures.numpy()[asked], only).mean())
    figures["clip_score"] = float(score(pictures, [row["prompt"] for row in rows]).mean())
    return {name: round(value, 4) for name, value in figures.items()}


def _renderer(folder: Path) -> Renderer:
    """Load a renderer, which was trained with one zero in place of T5's states."""
    from bridges.judges.text_to_image import TextToImage

    judge = TextToImage(path=str(folder), steps=_RENDER_STEPS, batch_size=64, max_sequence_length=1)
    return judge.load("cpu")


def _scene_figures(folder: Path, prompts: int, part: str = "scenes") -> dict:
    """Shares of the harder world's requests that the checker finds fulfilled, by kind, with the renderer of a part."""
    from scripts.miniature.train_scorer_scenes import fill_in

    renderer = _renderer(folder / f"renderer_{part}")
    rows, rng = speech_scenes.prompts("test", prompts, _SEED), np.random.default_rng(_SEED)
    if part == "erring":
        rows = [row for row in rows if row["kind"] in world.ERRING_KINDS]
    asked = [row["prompt"] for row in rows]
    texts = {
        "unchanged": asked,
        "start": greedy_rewrites(folder / "policy_scenes", asked),
        "oracle": [row["oracle"] for row in rows],
    }
    seeds = list(range(len(rows)))
    pictures = {way: renderer.draw(words, seeds, evaluation=False).numpy() for way, words in texts.items()}
    pictures["true_pictures"] = drawing.draw_scenes(np.stack([fill_in(rng, row["requested"]) for row in rows]), rng)
    figures = {}
    for way, images in pictures.items():
        right = scenes.pixel_accuracy(images, [row["requested"] for row in rows])
        kinds = {kind: right[[row["kind"] == kind for row in rows]] for kind in scenes.KINDS}
        figures[way] = {name: round(float(of.mean()), 4) for name, of in {"all": right, **kinds}.items() if of.size}
    return figures


def check(folder: Path = WEIGHTS, prompts: int = _PROMPTS) -> dict:
    """Measure the world's validity on held-out prompts; print the figures and write them beside the weights.

    Args:
        folder: Holds a folder for each of the parts.
        prompts: How many.

    Raises:
        UserError: A part is not there.
    """
    missing = [part for part in miniature.PARTS if not (folder / part).is_dir()]
    if missing:
        raise UserError(f"{folder} has no {' and no '.join(missing)}: build it there first, or give another --out")
    import torch

    from bridges.judges.open_clip import OpenClip
    from scripts.miniature import seeing, train_scorer

    renderer = _renderer(folder / "renderer")
    scorer = OpenClip(model=str(folder / "scorer")).load("cpu")

    def draw(texts: list[str]) -> torch.Tensor:
        return renderer.draw(texts, list(range(len(texts))), evaluation=False)

    rows = speech.prompts("test", prompts, seed=_SEED)
    true = np.stack([drawing.indices(speech.complete(row["requested"])) for row in rows])
    start = time.perf_counter()
    draw([row["oracle"] for row in rows])
    speed = len(rows) / (time.perf_counter() - start)
    ways = {
        "unchanged": [row["prompt"] for row in rows],
        "start": greedy_rewrites(folder / "policy", [row["prompt"] for row in rows]),
        "oracle": [row["oracle"] for row in rows],
    }
    figures = {
        "checker_on_true_pictures": _checker_figures(min(2000, 8 * prompts)),
        "test_prompts": prompts,
        "render_steps": _RENDER_STEPS,
        "images_per_second": round(speed, 1),
        **{name: _measure(texts, rows, draw, scorer.image_text) for name, texts in ways.items()},
        "true_pictures": _measure([], rows, lambda _: torch.from_numpy(drawing.draw(true)), scorer.image_text),
        "score_by_wrong_attributes": train_scorer.score_by_wrong(scorer.image_text),
        **seeing.measure(folder / "policy_vl", prompts, _SEED, draw),
        "scenes": _scene_figures(folder, prompts),
        "erring": _scene_figures(folder, 3 * prompts, "erring"),
        "valid": {},
    }
    figures["valid"] = {
        "checker >= 0.99": figures["checker_on_true_pictures"]["all"] >= 0.99,
        "oracle >= 0.85": figures["oracle"]["pixel_accuracy"] >= 0.85,
        "start <= 0.40": figures["start"]["pixel_accuracy"] <= 0.40,
        "refinement: unmended <= 0.75": figures["refinement"]["unmended"] <= 0.75,
        "refinement: oracle >= 0.85": figures["refinement"]["oracle"] >= 0.85,
        "scenes: checker >= 0.99": min(figures["scenes"]["true_pictures"].values()) >= 0.99,
        "scenes: oracle >= 0.85": min(figures["scenes"]["oracle"].values()) >= 0.85,
        "scenes: start <= 0.40": figures["scenes"]["start"]["all"] <= 0.40,
        "erring: 0.50 <= oracle <= 0.70": 0.50 <= figures["erring"]["oracle"]["all"] <= 0.70,
    }
    text = json.dumps(figures, indent=2)
    print(text)
    (folder / "figures.json").write_text(text + "\n")
    return figures


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 if the world is valid, 1 if not, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m scripts.miniature.build", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*miniature.PARTS, "all", "check"])
    parser.add_argument("--out", type=Path, default=WEIGHTS, metavar="FOLDER", help="of the parts (%(default)s)")
    parser.add_argument("--steps", type=int, help="updates of each part, for a trial; needs --out")
    parser.add_argument("--prompts", type=int, help=f"test prompts of check, for a trial ({_PROMPTS}); needs --out")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; 0 leaves its own choice")
    return run_cli(lambda words: _run(parser.parse_args(words)), arguments)


def _run(options: argparse.Namespace) -> int:
    for name in ("steps", "prompts"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name}: expected at least 1, got {value}")
        if value is not None and options.out.resolve() == WEIGHTS.resolve():
            raise UserError(f"--{name} is for trials: the package's weights are built and measured in full; give --out")
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    if options.what != "check":
        # In the order of their cost: what can fail early fails early.
        build(miniature.PARTS if options.what == "all" else [options.what], options.out, options.steps)
    if options.what in ("check", "all"):
        return 0 if all(check(options.out, options.prompts or _PROMPTS)["valid"].values()) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
