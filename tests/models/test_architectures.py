"""Properties of architectures beyond logits: transformers' greedy tokens, and limited positions."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

torch = pytest.importorskip("torch")
from support import tiny_models  # noqa: E402
from support import torch_reference as reference  # noqa: E402
from support.folders import load_folder  # noqa: E402
from support.text_task import train_here  # noqa: E402
from support.tiny_decoders import drawn  # noqa: E402

from grpo_jax.models import architectures  # noqa: E402
from grpo_jax.models.architectures.gpt2 import GPT2_ARCHITECTURE, GPT2Config  # noqa: E402
from grpo_jax.models.attention import attend_streams  # noqa: E402
from grpo_jax.models.layers import COLUMNS, ROWS, Projection  # noqa: E402
from grpo_jax.models.lora import LoraConfig  # noqa: E402
from grpo_jax.models.policy import Policy  # noqa: E402
from grpo_jax.sampling.sampler import SamplingParams, make_sampler  # noqa: E402

# Those whose layers differ from one another where they decode; the others are Llama's.
ARCHITECTURES = (
    *(pytest.param(name, marks=pytest.mark.wide) for name in ("smollm3", "olmo2")),
    "gemma3_text",
)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def world(request, tmp_path_factory):
    """A torch model, and the same weights loaded from its folder."""
    model = reference.model(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "source"
    model.save_pretrained(folder)
    return model, load_folder(folder, tokenizer=False)


def test_greedy_tokens_are_those_of_transformers(world):
    """Left-padded prompts, each read by its group where it is; completions longer than the windows."""
    model, loaded = world
    tokens, mask = reference.group_batch()[:2]
    policy = Policy(loaded.config)
    sample = make_sampler(policy, SamplingParams(2, 8, temperature=0.0), eos_ids=loaded.eos_ids, pad_id=0)
    samples = sample({"params": loaded.params}, tokens, mask, jax.random.split(jax.random.key(0), 3))
    ids, attention = torch.tensor(tokens, dtype=torch.long), torch.tensor(mask, dtype=torch.long)
    with torch.no_grad():
        written = model.generate(ids, attention_mask=attention, do_sample=False, max_new_tokens=8, pad_token_id=0)
    expected = np.zeros((3, 8), np.int32)
    expected[:, : written.shape[1] - 6] = written[:, 6:]
    np.testing.assert_array_equal(samples.tokens, np.repeat(expected[:, None], 2, axis=1))
    batch = tokens, mask, np.array(samples.tokens), np.array(samples.mask)
    with torch.no_grad():
        logs = torch.log_softmax(reference.completion_logits(model, batch), -1)
    theirs = logs.gather(-1, torch.tensor(batch[2], dtype=torch.long)[..., None])[..., 0]
    np.testing.assert_allclose(samples.logprobs[batch[3]], theirs.numpy()[batch[3]], atol=1e-4)


@pytest.mark.parametrize(("architecture", "most"), [("gpt2", 64), ("phi3", 32)])
def test_what_is_longer_than_the_positions_is_refused(tmp_path, architecture, most):
    """Of GPT-2's learned ones, and of longrope's first table. Padding does not count."""
    loaded = load_folder(reference.folder(tmp_path / "source", architecture), tokenizer=False)
    policy, variables = Policy(loaded.config), {"params": loaded.params}
    sample = make_sampler(policy, SamplingParams(1, 1), eos_ids=(5,), pad_id=0)
    tokens, places = np.ones((1, most + 6), np.int32), np.arange(most + 6)[None]
    key = jax.random.split(jax.random.key(0), 1)
    assert sample(variables, tokens, places >= 7, key).mask.all()
    with pytest.raises(ValueError, match=rf"at most {most} tokens together, .*; got {most} and 1"):
        sample(variables, tokens, places >= 6, key)
    completion = np.ones((1, 1, 1), np.int32), np.ones((1, 1, 1), bool)
    with pytest.raises(ValueError, match=f"at most {most} tokens"):
        policy.forward_group(variables, tokens, places >= 6, *completion)
    # Under jit the mask is not known: what cannot be is not a number, rather than wrong.
    assert np.isfinite(jax.jit(policy.prefill)(variables, tokens, places >= 6).hidden).all()
    assert np.isnan(jax.jit(policy.prefill)(variables, tokens, places >= 0).hidden).all()


@dataclasses.dataclass(frozen=True)
class OwnConfig(GPT2Config):
    model_type = "own"


class OwnBlock(nn.Module):
    """Root mean squares without weights, squared ReLUs, and no biases; after `gpt2` and `layers` alone."""

    config: OwnConfig
    dtype: jax.typing.DTypeLike
    lora: LoraConfig | None = None
    spread: Callable | None = None
    attention: str = "rows"
    products: str = ""

    @nn.compact
    def __call__(self, x, layer_input, context):
        c, heads = self.config, (*x.shape[:-1], self.config.num_heads, self.config.head_dim)

        def projection(name, features, x):
            return Projection(features, False, self.dtype, self.lora, self.products, name=name)(x)

        def norm(x):
            return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + c.layer_norm_eps)

        x = x if self.spread is None else self.spread(x)
        query, key, value = (projection(name, c.hidden_size, norm(x)).reshape(heads) for name in "qkv")
        mixed, written = attend_streams(query[..., None, :], key, value, layer_input, context, attention=self.attention)
        x = x + projection("o", c.hidden_size, mixed)
        inner = jax.nn.relu(projection("up", c.intermediate_size, norm(x))) ** 2
        return x + projection("down", c.hidden_size, inner), written


OWN = GPT2_ARCHITECTURE._replace(
    model_types=("own",), block=OwnBlock,
    projections=dict.fromkeys("qkv", COLUMNS) | {"o": ROWS, "up": COLUMNS, "down": ROWS},
)  # fmt: skip


def test_an_own_block_samples_what_its_forward_computes(monkeypatch):
    monkeypatch.setitem(architectures.ARCHITECTURES, "own", OWN)
    config, lora = OwnConfig(97, 24, 32, 2, 3, 40), LoraConfig(2, 4.0, ("q", "down"))
    policy = Policy(config, lora=lora)
    variables = drawn(config, lora)
    tokens, mask = reference.group_batch()[:2]
    sample = make_sampler(policy, SamplingParams(2, 6), eos_ids=(96,), pad_id=0)
    samples = sample(variables, tokens, mask, jax.random.split(jax.random.key(0), 3))

    @jax.jit
    def read(variables):
        hidden = policy.forward_group(variables, tokens, mask, samples.tokens, samples.mask)
        return policy.token_logprobs(variables, hidden, samples.tokens, temperature=1.0)[0]

    logprobs = read(variables)
    np.testing.assert_allclose(np.where(samples.mask, logprobs, 0), samples.logprobs, atol=1e-5)


def test_the_command_says_that_positions_are_few_before_anything_runs(place, tmp_path, capsys):
    reference.folder(tmp_path / "policy", "gpt2", vocab_size=300)
    tiny_models.chat_tokenizer().save_pretrained(tmp_path / "policy")
    options = [f"--policy.path={tmp_path / 'policy'}", "--data.max_prompt_tokens=57"]
    capsys.readouterr()  # the reference tells of its shards
    assert train_here(place.config, tmp_path / "run", *options) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(message in error for message in ("data.max_prompt_tokens = 57", "65 tokens", "64 only")), error
