"""A decoder of two small layers, and a batch for it, for tests of the update."""

import jax
import numpy as np
import optax
from support.tiny_decoders import QWEN2_FIELDS, drawn

from grpo_jax.config.sections import AlgorithmSection, PPOSection, TrainingSection
from grpo_jax.models.architectures import DecoderConfig
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
    rng = np.random.default_rng(0)
    lengths = np.arange(PROMPTS * GROUP).reshape(PROMPTS, GROUP, 1) % STEPS + 1
    arrays = {
        "prompt_tokens": rng.integers(0, 64, (PROMPTS, LENGTH), np.int32),
        "prompt_mask": np.ones((PROMPTS, LENGTH), bool),
        "tokens": rng.integers(0, 64, (PROMPTS, GROUP, STEPS), np.int32),
        "mask": np.arange(STEPS) < lengths,
        "advantages": rng.normal(size=(PROMPTS, GROUP)).astype(np.float32),
    }
    return Batch(**jax.device_put(arrays))


def make_variables(*, lora=None, value: bool = False) -> dict:
    """Fresh weights; a value head that is not at its start of zeros, where little would show."""
    variables = drawn(CONFIG, lora, start=CONFIG.initializer_range)
    if value:
        kernel = np.random.default_rng(7).normal(0, 0.3, CONFIG.hidden_size)
        variables[VALUE] = jax.device_put({"kernel": kernel.astype(np.float32), "bias": np.float32(0.1)})
    return variables


def updates(section: AlgorithmSection, *, lora=None, ppo=PPOSection(), **training):
    """A batch's update by plain gradient descent, as a function: the start, the state after it, and the report.

    Adam's first step would hide the scale of the gradient.
    """
    optimizer, training = optax.sgd(1.0), TrainingSection(prompts_per_batch=PROMPTS, **training)
    policy = Policy(CONFIG, lora=lora, remat="none")
    options = {"temperature": TEMPERATURE, "max_new_tokens": STEPS, "ppo": ppo}
    update = make_update(policy, optimizer, section, training, **options)

    def updated(batch):
        variables = make_variables(lora=lora, value=section.learns_values)
        state = init_state(variables, optimizer, keep_reference=True)
        return variables, *update(state, batch, jax.random.key(2))

    return updated


def updated(batch, section: AlgorithmSection, **options):
    """`updates` of one batch alone."""
    return updates(section, **options)(batch)
