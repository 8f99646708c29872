"""The warm start teaches what is sampled: the same tokens may be written, and texts end as the sampler's do."""

import json
import re
import threading

import jax
import numpy as np
import pytest
import torch
from support.tiny_models import causal_lm

from grpo_jax.config import from_dict
from grpo_jax.errors import UserError
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.parts import load_parts
from grpo_jax.training.supervised import warm_start

PROMPT, TEXT = "linen lamp", "red soap"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A folder with two end tokens, of which the tokenizer's own, which ends its turns, comes second."""
    folder = causal_lm(tmp_path_factory.mktemp("warm") / "policy")
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text())
    assert generation["eos_token_id"] == [258, 256]
    path.write_text(json.dumps(generation | {"eos_token_id": [256, 258]}))
    return folder


@pytest.fixture(scope="module")
def parts(policy, tmp_path_factory):
    """Parts of a tiny recommendation run with a given policy, and the same with a longer or no warm start."""

    def load(**changes):
        values = {
            "task": "recommendation",
            "run_dir": str(tmp_path_factory.mktemp("run")),
            "policy": {"path": str(policy), "remat": "none"},
            "recommendation": {"dummy_users": 40, "dummy_items": 280},
            "warm_start": {"steps": 1, "batch": 1, "learning_rate": 0.01},
            "data": {"allowed_tokens": "english"},
            "sampling": {"group_size": 2, "max_new_tokens": 12, "temperature": 0.7},
            "training": {"prompts_per_batch": 2, "max_steps": 1},
            "evaluation": {"every": 0},
        }
        return load_parts(from_dict(values | changes), say=lambda *_: None)

    return load


@pytest.fixture
def taught(tmp_path):
    """Runs a warm start: variables, and the lines it said."""

    def teach(parts, pairs):
        said = []
        with Checkpoints(tmp_path / "checkpoints") as checkpoints:
            stop = threading.Event()
            variables, _ = warm_start(parts, pairs, checkpoints=checkpoints, meta={}, stop=stop, say=said.append)
        return variables, said

    return teach


def torch_loss(policy, parts, ids) -> float:
    """The mean loss of these tokens behind the prompt, over the allowed tokens at the run's temperature."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype="float32")
    tokens, mask = parts.environment.encode([PROMPT])
    prompt = tokens[0][mask[0]].tolist()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.7
    logits[:, ~torch.from_numpy(parts.allowed_tokens)] = -torch.inf
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids)))


def test_the_loss_is_that_of_the_distribution_that_is_sampled(policy, parts, taught):
    loaded = parts()
    ids = loaded.loaded.tokenizer(TEXT)["input_ids"]
    _, said = taught(loaded, [(PROMPT, TEXT)])
    assert float(re.search(r"loss (\S+)", said[-1])[1]) == pytest.approx(
        torch_loss(policy, loaded, [*ids, 258]), abs=1e-3
    )


def test_a_taught_policy_ends_its_texts_with_the_token_that_ends_a_turn(parts, taught):
    loaded = parts(warm_start={"steps": 80, "batch": 1, "learning_rate": 0.01})
    variables, _ = taught(loaded, [(PROMPT, TEXT)])
    tokens, mask = loaded.environment.encode([PROMPT])
    samples = loaded.greedy_sampler(variables, tokens, mask, jax.random.split(jax.random.key(0), 1))
    written = np.asarray(samples.tokens)[np.asarray(samples.mask)].tolist()
    assert written == [*loaded.loaded.tokenizer(TEXT)["input_ids"], 258]
    assert not samples.truncated.any()


def test_a_text_ends_where_the_sampler_would_stop(policy, parts, taught):
    loaded = parts()
    ids = loaded.loaded.tokenizer("red")["input_ids"]
    _, said = taught(loaded, [(PROMPT, "red<|endoftext|> soap")])
    assert float(re.search(r"loss (\S+)", said[-1])[1]) == pytest.approx(
        torch_loss(policy, loaded, [*ids, 256]), abs=1e-3
    )


def test_texts_that_cannot_be_written_are_counted_and_left_out(policy, parts, taught):
    loaded = parts()
    variables, said = taught(loaded, [(PROMPT, "été"), (PROMPT, TEXT), (PROMPT, "x" * 12 + "é")])
    assert said[0].startswith("warm start: 1 of 3 pairs are left out") and "data.allowed_tokens = english" in said[0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(variables))


def test_too_few_texts_that_can_be_written_are_refused(parts, taught):
    with pytest.raises(UserError, match="expected at most 0, as many as there are pairs to teach, got 1"):
        taught(parts(), [(PROMPT, "été")])
