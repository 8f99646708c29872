"""The configs of examples/many_cards place as many parts as they have cards."""

import pytest
from support.imports import ROOT

from grpo_jax.config.command_line import parse
from grpo_jax.planning.memory import places_of


@pytest.mark.parametrize(("cards", "policy"), [(8, 1), (64, 3), (512, 8)])
def test_an_example_counts_its_cards(cards, policy):
    file = ROOT / "examples" / "many_cards" / f"{cards}.yaml"
    config = parse(["--config=prompt_enhancement_sd3", f"--config={file}"])
    drawing, scoring = (config.judges[name].pool.replicas for name in ("renderer", "scorer"))
    assert policy + drawing + scoring == cards
    places = {"policy": tuple(f"gpu:{card}" for card in range(policy)), "renderer": ("cpu",), "scorer": ("cpu",)}
    assert places_of(config, policy) == places
