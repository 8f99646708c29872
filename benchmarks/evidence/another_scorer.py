"""Whether a scorer that no reward came from agrees with what runs of the harder world gained.

    python benchmarks/evidence/another_scorer.py RUN_DIR … [--scorer FOLDER]

The scorer is trained into FOLDER where there is none: of another seed and another kind than the rewarding one, whose
eye is a ResNet; this one's is a vision transformer. Of each run (`prompt_enhancement_scenes`) it scores pictures of the
same 192 held-out requests: of the starting policy's greedy rewrites, of the trained policy's, of the oracle's, and as a
control the trained policy's picture of another request of that kind. Prints the mean cosine of request and picture.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bridges import miniature
from bridges.miniature import scenes
from bridges.renderers.stable_diffusion_3 import StableDiffusion3
from bridges.scorers.open_clip import OpenClip
from scripts.miniature import train_scorer_scenes
from scripts.miniature.build import greedy_rewrites

REQUESTS, SEED, STEPS = 192, 1, 1000
EYE = {"layers": 4, "width": 64, "head_width": 32, "patch_size": 8}


def compared(runs: list[Path], scorer: Path) -> str:
    """The table: of each kind of request the mean scores by both scorers."""
    rows, kinds = scenes.prompts("test", REQUESTS), len(scenes.KINDS)
    asked = [row["prompt"] for row in rows]
    renderer = StableDiffusion3("miniature_scenes", steps=4, batch_size=64).load("cpu")
    judges = {"another": OpenClip(str(scorer)).load("cpu"), "rewarding": OpenClip("miniature_scenes").load("cpu")}

    def draw(texts: list[str]) -> torch.Tensor:
        return renderer.draw(texts, list(range(len(texts))), evaluation=False)

    pictures = {
        "before": draw(greedy_rewrites(miniature.path("policy_scenes"), asked)),
        "oracle": draw([row["oracle"] for row in rows]),
    }
    for run in runs:
        pictures[f"after, {run.name}"] = after = draw(greedy_rewrites(run / "policy", asked))
        pictures[f"another request's, {run.name}"] = after.roll(-kinds, 0)
    lines = [f"| scorer | pictures | {' | '.join(scenes.KINDS)} | all |", "|---|---|" + "---|" * (kinds + 1)]
    for judge, scorer_of in judges.items():
        for name, drawn in pictures.items():
            scores = np.array(scorer_of.image_text(drawn, asked))
            means = [*(scores[kind::kinds].mean() for kind in range(kinds)), scores.mean()]
            lines.append(f"| {judge} | {name} | {' | '.join(f'{mean:.2f}' for mean in means)} |")
    return "\n".join(lines)


def main() -> None:
    """Trains the scorer unless it is there, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN_DIR")
    parser.add_argument("--scorer", type=Path, default=Path("runs/another_scorer"), metavar="FOLDER")
    options = parser.parse_args()
    if not (options.scorer / "open_clip_model.safetensors").exists():
        train_scorer_scenes.train(options.scorer, steps=STEPS, seed=SEED, eye=EYE)
    print(compared(options.runs, options.scorer))


if __name__ == "__main__":
    main()
