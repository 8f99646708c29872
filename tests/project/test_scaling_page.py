"""The figures of docs/scaling.md are those of its formula."""

from pathlib import Path

import pytest

from grpo_jax.config.command_line import parse
from grpo_jax.planning.memory import places_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scaling.md").read_text()
SECONDS = {"sample": 4, "render": 512, "score": 1, "update": 4}  # of 256 completions on one card each, as assumed there


@pytest.mark.parametrize(("cards", "policy"), [(8, 1), (64, 3), (512, 8)])
def test_an_example_counts_its_cards_and_takes_the_seconds_shown(cards, policy):
    file = ROOT / "examples" / "many_cards" / f"{cards}.yaml"
    config = parse(["--config=prompt_enhancement_sd3", f"--config={file}"])
    drawing, scoring = (config.judges[name].pool.replicas for name in ("renderer", "scorer"))
    assert policy + drawing + scoring == cards
    places = {"policy": tuple(f"gpu:{card}" for card in range(policy)), "renderer": ("cpu",), "scorer": ("cpu",)}
    assert places_of(config, policy) == places

    completions = config.training.prompts_per_batch * config.sampling.group_size
    workers = {"sample": policy, "render": drawing, "score": scoring, "update": policy}
    sample, render, score, update = (SECONDS[name] * completions / 256 / workers[name] for name in SECONDS)
    share = config.training.chunk_prompts / config.training.prompts_per_batch
    iteration = share * (sample + render + score) + (1 - share) * render + update
    if config.training.async_level:
        iteration = max(render, sample + update, iteration / 2)
    figures = " | ".join(f"{seconds:.2f}" for seconds in (sample, render, score, update, iteration))
    assert f" | {figures} | {completions / iteration:.3g} |\n" in PAGE
