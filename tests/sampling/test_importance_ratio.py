"""Importance ratios of completions from a sampler that is not the policy, with the miniature's policy."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from support.encoded_prompts import left_padded
from support.folders import load_folder

from bridges import miniature
from grpo_jax.core.logprobs import token_logprobs
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


@pytest.mark.wide  # each part is tested by itself in test_sampling.py and test_sampling_models.py
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_page_has_these_figures(setting):
    """Of sixteen captions behind the chat template; a policy that rewrites them repeats their words."""
    loaded = load_folder(miniature.path("policy"))
    policy, variables = Policy(loaded.config), {"params": loaded.params}
    allowed = np.ones(loaded.config.vocab_size, bool)
    if "forbidden" in setting:
        allowed[loaded.tokenizer("red small")["input_ids"]] = False
    sample = make_sampler(
        policy,
        SamplingParams(32, 14, **SETTINGS[setting]),
        eos_ids=loaded.eos_ids,
        pad_id=loaded.pad_id,
        allowed_tokens=allowed,
    )
    asked = [[{"role": "user", "content": row["oracle"]}] for row in speech.prompts("test", 16)]
    ids = [loaded.tokenizer.apply_chat_template(one, add_generation_prompt=True)["input_ids"] for one in asked]
    tokens, mask = left_padded(ids, loaded.pad_id)
    samples = jax.device_get(sample(variables, tokens, mask, jax.random.split(jax.random.key(0), len(tokens))))
    hidden, head = policy.forward_group(variables, tokens, mask, samples.tokens, samples.mask), policy.head(variables)
    update, _ = token_logprobs(hidden, head, samples.tokens, allowed_tokens=allowed)
    everything, _ = token_logprobs(hidden, head, samples.tokens)
    drawn = samples.mask
    assert drawn.sum() > 2000
    ratio = np.exp(everything - samples.sampler_logprobs)[drawn]
    figures = [ratio.mean(), (ratio < 0.8).mean(), np.exp(update - samples.logprobs)[drawn].mean()]
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{setting}` | "))
    told = [float(one) for one in re.findall(r"\| (\d*\.\d+) ", row)]
    np.testing.assert_allclose(told, figures, atol=0.015)
