"""The sampler on a real decoder: against transformers' generate and against the update's own forward."""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_models
from support.encoded_prompts import left_padded
from support.folders import load_folder
from support.tiny_decoders import LLAMA, drawn

from grpo_jax.core.logprobs import token_logprobs
from grpo_jax.models.policy import Policy
from grpo_jax.models.variables import numbered, unstack
from grpo_jax.sampling.decoding import PromptBatch, cache_sizes, make_ends, write_completions
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.token_choice import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "targets"))

from launches import parse_program, steps

NEW_TOKENS = 10
TEXTS = ("a red disc", "two cats!", "sky")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # Wide initial weights: the logits of the usual 0.02 are so alike that rounding could decide.
    return tiny_models.causal_lm(tmp_path_factory.mktemp("policy"), initializer_range=0.3)


@pytest.fixture(scope="module")
def loaded(folder):
    return load_folder(folder)


@pytest.fixture(scope="module")
def variables(loaded):
    return {"params": loaded.params}


def encode(loaded, texts):
    return left_padded([loaded.tokenizer(text)["input_ids"] for text in texts], loaded.pad_id)


@jax.jit
def folded(prompt_ids):
    return jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(prompt_ids)


def keys_for(prompt_ids):
    return folded(np.array(prompt_ids))


def logprobs_of_update(policy, variables, prompts, samples, **options):
    """Those of the shared full forward pass, as one program."""

    @jax.jit
    def read(variables):
        hidden = policy.forward_group(variables, *prompts, samples.tokens, samples.mask)
        return token_logprobs(hidden, policy.head(variables), samples.tokens, **options)[0]

    return np.asarray(read(variables))


def test_logprobs_are_those_of_the_updates_forward(loaded, variables):
    # One distribution is trained: cached decoding and the shared full forward must agree on it.
    policy = Policy(loaded.config)
    allowed = np.arange(tiny_models.VOCAB_SIZE) % 5 != 3
    params = SamplingParams(3, NEW_TOKENS, temperature=1.3, top_k=40, top_p=0.9)
    ends = tuple(range(0, 60, 2))  # many, so that completions end at different places
    sample = make_sampler(policy, params, eos_ids=ends, pad_id=loaded.pad_id, allowed_tokens=allowed)
    tokens, mask = encode(loaded, TEXTS)
    samples = sample(variables, tokens, mask, keys_for([0, 1, 2]))
    logprobs = logprobs_of_update(policy, variables, (tokens, mask), samples, temperature=1.3, allowed_tokens=allowed)
    drawn = np.asarray(samples.mask)
    assert len(set(drawn.sum(-1).ravel())) > 2
    assert allowed[np.asarray(samples.tokens)[drawn]].all()
    np.testing.assert_allclose(samples.logprobs[drawn], logprobs[drawn], atol=1e-4, rtol=0)
    assert (np.asarray(samples.sampler_logprobs) >= np.asarray(samples.logprobs) - 1e-6).all()


def test_a_growing_cache_and_fewer_rows_are_the_updates_forward(loaded, variables):
    """Long completions: through two sizes of the cache, while most rows of several prompts end early."""
    policy, steps = Policy(loaded.config), 70
    assert len(cache_sizes(steps)) == 2
    tokens, mask = encode(loaded, (*TEXTS, "a b"))
    ends = tuple(range(14))  # some completions of a prompt end early, others not at all
    sample = make_sampler(policy, SamplingParams(8, steps), eos_ids=ends, pad_id=loaded.pad_id)
    samples = sample(variables, tokens, mask, keys_for(range(4)))
    drawn = np.asarray(samples.mask)
    logprobs = logprobs_of_update(policy, variables, (tokens, mask), samples)
    np.testing.assert_allclose(samples.logprobs[drawn], logprobs[drawn], atol=1e-4, rtol=0)
    continuing = drawn.sum((0, 1))
    assert (continuing <= 8).sum() > 2 and continuing[-1] > 0 and (drawn[..., -1].sum(-1) > 0).sum() > 1


@pytest.mark.parametrize(("prompts", "group", "heads"), [(1, 1, 1), (2, 8, 2)])
def test_a_token_is_written_into_the_cache_in_place(prompts, group, heads):
    """No loop over tokens moves a cache, be there one prompt, one head, groups of one, or one prompt that goes on."""
    config = replace(LLAMA, num_layers=1, num_kv_heads=heads, windows=(None,))
    policy, variables = Policy(config), drawn(config)
    ends, params = make_ends((0,), 0, None), SamplingParams(group, 40)

    def write(variables, tokens, keys):
        there = jnp.ones_like(tokens, bool)
        return write_completions(policy, params, ends, variables, PromptBatch(tokens, there, keys, there[:, 0], None))

    given = jnp.ones((prompts, 8), jnp.int32), jax.random.split(jax.random.key(0), prompts)
    computations, entry = parse_program(jax.jit(write).lower(variables, *given).compile().as_text())
    kernels = [step for step in steps(computations, entry) if any(loop.tokens for loop in step.loops)]
    loops = {loop.name for step in kernels for loop in step.loops if loop.tokens}
    assert len(loops) == (2 if prompts > 1 else 1)  # all prompts, and half of them
    fused = [name for step in kernels for name in step.instruction.called("calls")]
    lines = [step.instruction for step in kernels] + [line for name in fused for line in computations[name].values()]
    fewest = prompts // 2 or 1
    of_cache = [line for line in lines if line.arrays[0].size >= fewest * heads * group * config.head_dim * 40]
    assert sum(line.opcode == "dynamic-update-slice" for line in of_cache) == 2 * len(loops)  # keys and values
    assert not [line for line in of_cache if line.opcode in ("copy", "transpose")]


def test_layers_of_a_shape_are_taken_apart_by_one_piece_of_code(loaded, variables):
    """By numbers that are arguments: as constants each layer of each weight is compiled for itself."""
    tokens, mask = encode(loaded, TEXTS)
    sample = make_sampler(Policy(loaded.config), SamplingParams(2, 4), eos_ids=(), pad_id=loaded.pad_id)
    traced = jax.make_jaxpr(lambda variables: sample(variables, tokens, mask, keys_for(range(len(TEXTS)))))(variables)
    (write,) = [equation.params["jaxpr"] for equation in traced.eqns if equation.params.get("name") == "write"]
    stacks = jax.tree.leaves(variables["params"]["layers"])
    taken = [equation for equation in write.eqns if equation.params.get("name") == "dynamic_index_in_dim"]
    assert len(taken) == len(stacks) * loaded.config.num_layers
    assert {equation.invars[1] for equation in taken} <= set(write.jaxpr.invars)
    jax.tree.map(np.testing.assert_array_equal, unstack(numbered(variables)), unstack(variables))
