"""What the benchmark for a card says of itself without one: limits of its parts, and weights as a run keeps them."""

import sys
from pathlib import Path

import jax
import pytest

HERE = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(HERE / "gpu"), str(HERE), *sys.path])
    before = set(sys.modules)
    yield __import__
    for name in set(sys.modules) - before:
        if str(HERE) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_every_part_has_measurements(scripts):
    for part in scripts("driver").PARTS.values():
        assert scripts(part.module).measurements(True, *part.arguments)


def test_weights_apart_are_those_of_a_run(scripts):
    """As a frozen 7 B is kept on a card: each layer with arrays of its own."""
    scripts("iteration_work")
    shapes, work = scripts("shapes"), scripts("iteration_work")
    from grpo_jax.models.decoder import init_variables
    from grpo_jax.models.fused_projections import apart_and_joined
    from grpo_jax.models.lora import LoraConfig

    case = shapes.case("7B", True, prompts=1, group=1, prompt_tokens=4, new_tokens=4)
    config = work.decoder_config(case)
    lora = LoraConfig(2, 4.0, ("q_proj", "down_proj"))
    made = shapes.variables(config, "bfloat16", lora, apart=True)
    wanted = apart_and_joined(init_variables(config, jax.random.key(0), param_dtype="bfloat16")["params"], config)
    arrays = [jax.tree.map(lambda x: (x.shape, x.dtype), params) for params in (made["params"], wanted)]
    assert arrays[0] == arrays[1]
    stacked = shapes.variables(config, "bfloat16", lora)
    assert jax.tree.structure(made["lora"]) == jax.tree.structure(stacked["lora"])


def test_a_refused_donation_keeps_what_torch_reads(scripts):
    pytest.importorskip("torch")
    assert scripts("handover").donation()["agrees"]
