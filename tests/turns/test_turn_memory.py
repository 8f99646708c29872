"""--plan and the memory of the update count whole episodes: every turn, and what stands between them."""

import jax
import numpy as np
from support.tiny_decoders import QWEN2_FIELDS

from grpo_jax.config import make_config
from grpo_jax.models import hf
from grpo_jax.models.decoder import init_variables
from grpo_jax.models.policy import make_policy
from grpo_jax.planning import policy as plan
from grpo_jax.planning.policy import cache_bytes, policy_memory, tree_bytes
from grpo_jax.sampling.episodes import make_episode_sampler
from grpo_jax.sampling.token_choice import SamplingParams
from grpo_jax.training import memory as training_memory
from grpo_jax.training.memory import batch_shapes, state_shapes
from grpo_jax.training.objectives import make_forward

PROMPTS, GROUP, STEPS, ANSWER, TURNS = 4, 3, 6, 11, 3


def configured(**training):
    values = {"group_size": GROUP, "max_new_tokens": STEPS, "turns": TURNS, "max_answer_tokens": ANSWER}
    config = make_config(
        task={"kind": "text", "environment": "mine.py:respond"},
        data={"max_prompt_tokens": 16},
        sampling=values,
        training={"prompts_per_batch": PROMPTS, **training},
        algorithm={"turn_advantage": "return"},
        rewards=[{"name": "mine.py:reward"}],
    )
    return config, hf.model_config("tiny", QWEN2_FIELDS)


def test_an_updates_batch_is_as_long_as_an_episode_may_be():
    config, model = configured()
    policy = make_policy(model)
    batch = batch_shapes(config, state_shapes(config, model, None), make_forward(policy, temperature=1.0), None)
    assert config.sampling.stream_tokens == TURNS * STEPS + (TURNS - 1) * ANSWER == 40
    shape = (PROMPTS, GROUP, 40)
    assert batch.tokens.shape == batch.present.shape == batch.turn.shape == batch.advantages.shape == shape


def test_the_cache_is_what_the_sampler_holds():
    """The largest that a turn is given, and the one it makes, of both chunks that are on their way."""
    config, model = configured()
    sampler = make_episode_sampler(make_policy(model), SamplingParams(GROUP, STEPS), eos_ids=(0,), pad_id=0)
    variables = init_variables(model, jax.random.key(0))
    tokens, keys = np.ones((PROMPTS, 16), np.int32), jax.random.split(jax.random.key(0), PROMPTS)
    said = np.ones((PROMPTS, GROUP, ANSWER), np.int32)
    heard = said, said > 0, keys, np.ones((PROMPTS, GROUP), bool)

    def play(variables):
        _, carried = sampler.begin(variables, tokens, tokens > 0, keys)
        for _ in range(TURNS - 1):
            before, (_, carried) = carried, sampler.go_on(variables, carried, *heard)
        return before, carried

    before, after = jax.eval_shape(play, variables)
    prompts = tree_bytes((after.prefix.keys, after.prefix.values))
    caches = [tree_bytes((one.cache.keys, one.cache.values)) for one in (before, after)]
    assert cache_bytes(config, model) == prompts + sum(caches)
    chunked, _ = configured(prompts_per_batch=4 * PROMPTS, chunk_prompts=PROMPTS)
    assert cache_bytes(chunked, model) == 2 * prompts + 2 * caches[0] + caches[1]


def test_a_plan_compiles_the_last_turn_too(monkeypatch):
    """What it takes is asked of the sampler's own program, as a run makes it."""
    config, model = configured()
    asked = []

    def counted(program):
        asked.append(program.function.lower(*program.arguments).as_text().count("while"))
        return 2**20 * len(asked)

    for module in (plan, training_memory):
        monkeypatch.setattr(module, "temporary_bytes", counted)
    memory = policy_memory(config, model)
    assert len(asked) == 3 and memory.sampling > 0  # first turn, last turn, update
