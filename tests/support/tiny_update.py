"""A decoder of two small layers, and a batch for it, for tests of the update."""

import functools

import jax
import jax.numpy as jnp
import optax
from support.tiny_decoders import QWEN2_FIELDS

from grpo_jax.config.sections import AlgorithmSection, PPOSection, TrainingSection
from grpo_jax.models.architectures import DecoderConfig
from grpo_jax.models.decoder import init_variables
from grpo_jax.models.policy import Policy
from grpo_jax.models.variables import VALUE
from grpo_jax.training.batch import Batch
from grpo_jax.training.state import init_state
from grpo_jax.training.update import make_update

CONFIG = DecoderConfig.from_hf(
    QWEN2_FIELDS | {"vocab_size": 64, "max_position_embeddings": 64, "tie_word_embeddings": True}
)
PROMPTS, GROUP, LENGTH, STEPS = 4, 3, 5, 6
TEMPERATURE = 0.7


def make_batch() -> Batch:
    """Completions of unequal length, so that a mean of micro-batch means would be another number."""
    keys = jax.random.split(jax.random.key(0), 4)
    lengths = jnp.arange(PROMPTS * GROUP).reshape(PROMPTS, GROUP) % STEPS + 1
    return Batch(
        jax.random.randint(keys[0], (PROMPTS, LENGTH), 0, 64),
        jnp.ones((PROMPTS, LENGTH), bool),
        jax.random.randint(keys[1], (PROMPTS, GROUP, STEPS), 0, 64),
        jnp.arange(STEPS) < lengths[..., None],
        advantages=jax.random.normal(keys[2], (PROMPTS, GROUP)),
    )


@functools.cache
def _draw(lora):
    return jax.jit(functools.partial(init_variables, CONFIG, lora=lora))


def make_variables(*, lora=None, value: bool = False) -> dict:
    """Fresh weights; a value head that is not at its start of zeros, where little would show."""
    variables = _draw(lora)(jax.random.key(1))
    if value:
        kernel = 0.3 * jax.random.normal(jax.random.key(7), (CONFIG.hidden_size,))
        variables[VALUE] = {"kernel": kernel, "bias": jnp.float32(0.1)}
    return variables


def updated(
    batch,
    section: AlgorithmSection,
    *,
    lora=None,
    value=None,
    calls=1,
    ppo=PPOSection(),
    # Adam's first step would hide the scale of the gradient.
    optimizer=optax.sgd(1.0),
    **training,
):
    """The start, the state after some updates (by plain gradient descent unless told), and the last report."""
    value = section.learns_values if value is None else value
    variables = make_variables(lora=lora, value=value)
    training = TrainingSection(prompts_per_batch=PROMPTS, **training)
    policy = Policy(CONFIG, lora=lora, remat="none")
    options = {"temperature": TEMPERATURE, "max_new_tokens": STEPS, "ppo": ppo}
    update = make_update(policy, optimizer, section, training, **options)
    state = init_state(variables, optimizer, keep_reference=True)
    for _ in range(calls):
        state, report = update(state, batch, jax.random.key(2))
    return variables, state, report
