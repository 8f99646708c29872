"""Plans of runs whose judges are in a pool: placed as a run places them."""

import jax
import pytest

from bridges import placement
from grpo_jax.config.command_line import parse
from grpo_jax.planning.cards import Planner
from grpo_jax.planning.policy import read_shape
from grpo_jax.train import main

POOL = ("--judges.renderer.replicas=4", "--judges.renderer.resources={num_gpus: 1}")


@pytest.fixture(scope="module", autouse=True)
def devices_have_started():
    """Planning for other devices would ask JAX for more of them, in this process too."""
    jax.devices()


def test_a_judge_in_a_pool_leaves_its_card_to_the_next(not_compiled, capsys):
    """As in a run (`runs.parts`), where it has no part in the placing."""
    config = parse(["--config=prompt_enhancement_miniature", *POOL])
    first, second, third, host = Planner(read_shape("miniature"), (16.0, 16.0, 16.0)).cards(config)
    assert [*first.parts] == ["policy", "runtime"] and [*second.parts] == ["scorer", "runtime"] and not third.parts
    assert host.name == "cpu" and "4 actors in a Ray cluster" in host.parts["renderer"][0].note
    places, _ = placement.resolve({name: where for name, where in config.requests.items() if name != "renderer"}, 3)
    assert places == {"policy": "gpu:0", "scorer": "gpu:1"}
    assert main([*POOL, "--devices.renderer=gpu:1", "--plan", "--device_memory_gib=16,16"]) == 2
    assert "devices.renderer: expected none for a judge in a pool" in capsys.readouterr().err
