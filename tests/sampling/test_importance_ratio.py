"""Importance ratios of completions from a sampler that is not the policy, with the miniature's policy."""

import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.encoded_prompts import left_padded
from support.folders import load_folder

from bridges import miniature
from grpo_jax.core.logprobs import token_logprobs
from grpo_jax.core.selection import importance_weights
from grpo_jax.models.policy import Policy
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.token_choice import SamplingParams
from scripts.miniature import speech

PAGE = Path(__file__).parents[2] / "docs" / "sampling.md"
SETTINGS = {
    "nothing": {},
    "top_k: 4": {"top_k": 4},
    "top_p: 0.8": {"top_p": 0.8},
    "min_p: 0.3": {"min_p": 0.3},
    "forbidden_tokens: [red, small]": {},
}


class Drawn(NamedTuple):
    """Of each drawn token its log-probabilities [N], and the policy's probabilities [N, V] before it."""

    setting: str
    sampler: np.ndarray
    policy: np.ndarray  # as the sampler returns it
    update: np.ndarray  # as the update computes it
    everything: np.ndarray  # among all tokens, the forbidden included
    probabilities: np.ndarray
    asked: np.ndarray  # bool [N, V]: tokens of the prompt
    repeats: np.ndarray  # bool [N]: whether the token drawn is one of them


def encode(tokenizer, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Sixteen captions behind the chat template; a policy that rewrites them repeats their words."""
    asked = [[{"role": "user", "content": row["oracle"]}] for row in speech.prompts("test", 16)]
    ids = [tokenizer.apply_chat_template(one, add_generation_prompt=True)["input_ids"] for one in asked]
    return left_padded(ids, pad_id)


@pytest.fixture(scope="module", params=SETTINGS)
def drawn(request) -> Drawn:
    loaded = load_folder(miniature.path("policy"))
    policy, variables = Policy(loaded.config), {"params": loaded.params}
    allowed = np.ones(loaded.config.vocab_size, bool)
    if "forbidden" in request.param:
        allowed[loaded.tokenizer("red small")["input_ids"]] = False
    sample = make_sampler(
        policy,
        SamplingParams(32, 14, **SETTINGS[request.param]),
        eos_ids=loaded.eos_ids,
        pad_id=loaded.pad_id,
        allowed_tokens=allowed,
    )
    tokens, mask = encode(loaded.tokenizer, loaded.pad_id)
    samples = jax.device_get(sample(variables, tokens, mask, jax.random.split(jax.random.key(0), len(tokens))))
    hidden, head = policy.forward_group(variables, tokens, mask, samples.tokens, samples.mask), policy.head(variables)
    update, _ = token_logprobs(hidden, head, samples.tokens, allowed_tokens=allowed)
    everything, _ = token_logprobs(hidden, head, samples.tokens)
    probabilities = jax.nn.softmax(jnp.where(allowed, hidden @ head.T, -jnp.inf))
    asked = np.zeros((len(tokens), loaded.config.vocab_size), bool)
    np.put_along_axis(asked, tokens, True, axis=-1)
    asked, repeats = asked[:, None, None], np.take_along_axis(asked[:, None], samples.tokens, axis=-1)
    asked = np.broadcast_to(asked, probabilities.shape)
    found = samples.sampler_logprobs, samples.logprobs, update, everything, probabilities, asked, repeats
    return Drawn(request.param, *(np.asarray(one)[samples.mask] for one in found))


def kept(setting: str, probabilities: np.ndarray) -> np.ndarray:
    """Which tokens a sampler draws at all, bool [N, V]."""
    likely = np.sort(probabilities, axis=-1)[:, ::-1]
    if setting.startswith("top_k"):
        return probabilities >= likely[:, 3:4]
    if setting.startswith("top_p"):
        last = (np.cumsum(likely, axis=-1) - likely < 0.8).sum(-1) - 1
        return probabilities >= np.take_along_axis(likely, last[:, None], axis=-1)
    return probabilities >= (0.3 * likely[:, :1] if setting.startswith("min_p") else 0)


def test_the_first_update_has_a_ratio_of_one(drawn):
    """Whatever sets the sampler apart: old log-probabilities are the policy's, among the tokens that exist."""
    assert len(drawn.update) > 2000
    np.testing.assert_allclose(np.exp(drawn.update - drawn.policy), 1, atol=1e-4)


def test_weights_undo_what_sets_the_sampler_apart(drawn):
    """Weighed, a token of the prompt is drawn again as often as the policy would, of those that are drawn at all."""
    weights = importance_weights(drawn.policy, drawn.sampler, np.ones(len(drawn.policy), bool), cap=1e6)
    repeatable = kept(drawn.setting, drawn.probabilities) & drawn.asked
    expected = np.where(repeatable, drawn.probabilities, 0).sum(-1)
    off = np.asarray(weights) * drawn.repeats - expected
    error = off.std() / np.sqrt(len(off))
    assert abs(off.mean()) < 4 * error
    if SETTINGS[drawn.setting]:
        assert abs((drawn.repeats - expected).mean()) > 6 * error


def test_the_page_has_these_figures(drawn):
    ratio = np.exp(drawn.everything - drawn.sampler)
    figures = [ratio.mean(), (ratio < 0.8).mean(), np.exp(drawn.update - drawn.policy).mean()]
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{drawn.setting}` | "))
    told = [float(one) for one in re.findall(r"\| (\d*\.\d+) ", row)]
    np.testing.assert_allclose(told, figures, atol=0.015)
