"""AdamW and Muon from the config: the schedule, and the weights that decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny_update

from grpo_jax.config.sections import OptimizerSection
from grpo_jax.models.architectures.gpt2 import GPT2Config
from grpo_jax.models.decoder import init_variables
from grpo_jax.models.lora import LoraConfig
from grpo_jax.models.variables import VALUE
from grpo_jax.training.state import make_optimizer, make_schedule

RATE, DECAY = 0.1, 0.5


def named(tree):
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree.leaves_with_path(tree)}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5]),
        ("cosine", [0.5, 1.0, 1.0, 0.5 + 0.5 * np.cos(np.pi / 4), 0.5]),
    ],
)
def test_schedule_warms_up_and_decays(schedule, expected):
    section = OptimizerSection(learning_rate=1.0, schedule=schedule, warmup_steps=2)
    rate = make_schedule(section, 6)
    np.testing.assert_allclose([rate(step) for step in range(5)], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "lora", "expected"),
    [
        (tiny_update.CONFIG, None, "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        (GPT2Config(50, 8, 16, 2, 2, 16), None, "c_attn attn_c_proj c_fc mlp_c_proj"),
        (tiny_update.CONFIG, LoraConfig(2, 4.0, ("q_proj", "v_proj")), "q_proj v_proj"),
    ],
    ids=["qwen2", "gpt2", "adapters"],
)
def test_only_matrices_of_projections_decay(config, lora, expected):
    """A step without a gradient is the decay alone."""
    collection = "params" if lora is None else "lora"
    shapes = jax.eval_shape(lambda key: init_variables(config, key, lora=lora), jax.random.key(0))
    trained = {collection: jax.tree.map(lambda leaf: np.full(leaf.shape, 2.0, leaf.dtype), shapes[collection])}
    trained[VALUE] = {"kernel": jnp.ones(8), "bias": jnp.float32(1)}
    section = OptimizerSection(learning_rate=RATE, weight_decay=DECAY)
    optimizer = make_optimizer(section, make_schedule(section, 10))

    @jax.jit
    def step(weights):
        return optimizer.update(jax.tree.map(jnp.zeros_like, weights), optimizer.init(weights), weights)[0]

    parts = ("kernel",) if lora is None else ("a", "b")
    names = {f"{collection}/layers/{name}/{part}" for name in expected.split() for part in parts}
    before = named(trained)
    for name, change in named(step(trained)).items():
        wanted = -RATE * DECAY * np.asarray(before[name]) if name in names else np.zeros(change.shape)
        np.testing.assert_allclose(change, wanted, rtol=1e-6, err_msg=name)
    assert names < set(before)


def orthogonal(momentum):
    """Five Newton-Schulz steps of one matrix, as https://kellerjordan.github.io/posts/muon writes them."""
    x = momentum.T if momentum.shape[0] > momentum.shape[1] else momentum
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if momentum.shape[0] > momentum.shape[1] else x


def test_muon_moves_each_layers_matrix_by_itself_and_the_rest_by_adamw():
    """The second step with weight decay, against a loop; RMS .2 as AdamW's."""
    random = np.random.default_rng(0)
    weights = {"params": {"layers": {"up": {"kernel": random.normal(size=(2, 3, 5))}}, "norm": {"scale": np.ones(4)}}}
    weights = jax.tree.map(jnp.float32, weights)
    gradients = [jax.tree.map(lambda x: jnp.float32(random.normal(size=x.shape)), weights) for _ in range(2)]
    section = OptimizerSection(name="muon", learning_rate=RATE, weight_decay=DECAY, max_grad_norm=0)
    optimizer = make_optimizer(section, make_schedule(section, 10))
    state = optimizer.init(weights)
    for gradient in gradients:
        moved, state = jax.jit(optimizer.update)(gradient, state, weights)
    first, second = (np.asarray(g["params"]["layers"]["up"]["kernel"], np.float64) for g in gradients)
    mean = (0.95 * 0.05 * first + 0.05 * second) / (1 - 0.95**3)
    momentum = 0.95 * mean + 0.05 * second / (1 - 0.95**2)  # Nesterov's, without bias
    for layer in range(2):
        kernel = np.asarray(weights["params"]["layers"]["up"]["kernel"][layer])
        step = -RATE * (0.2 * np.sqrt(5) * orthogonal(momentum[layer]) + DECAY * kernel)
        np.testing.assert_allclose(moved["params"]["layers"]["up"]["kernel"][layer], step, rtol=1e-4, atol=1e-5)
    adam = optax.adamw(RATE, b2=section.beta2, weight_decay=0.0)
    scales = [g["params"]["norm"]["scale"] for g in gradients]
    _, state = adam.update(scales[0], adam.init(scales[0]), scales[0])
    np.testing.assert_allclose(moved["params"]["norm"]["scale"], adam.update(scales[1], state, scales[1])[0], rtol=1e-5)
