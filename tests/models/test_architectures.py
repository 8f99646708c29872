"""What every newer architecture must hold beyond its logits: transformers' greedy tokens, from shared prompts."""

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from support import torch_reference as reference  # noqa: E402

from grpo_jax.models import hf  # noqa: E402
from grpo_jax.models.decoder import make_policy  # noqa: E402
from grpo_jax.sampling.sampler import SamplingParams, make_sampler  # noqa: E402

FAMILIES = ("smollm3", "phi3", "qwen3_moe", "gemma2", "gemma3_text")


@pytest.fixture(scope="module", params=FAMILIES)
def world(request, tmp_path_factory):
    """A torch model, and the same weights loaded from its folder."""
    model = reference.model(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "source"
    model.save_pretrained(folder)
    return model, hf.load_folder(folder, tokenizer=False)


def test_greedy_tokens_are_those_of_transformers(world):
    """Left-padded prompts, each read by its group where it is; completions longer than the windows."""
    model, loaded = world
    tokens, mask = reference.group_batch()[:2]
    policy = make_policy(loaded.config)
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


def test_longrope_is_used_up_to_where_it_changes(tmp_path):
    """Longer texts would take another table from their first token on: refused, and under jit not a number."""
    loaded = hf.load_folder(reference.folder(tmp_path / "source", "phi3"), tokenizer=False)
    policy, variables = make_policy(loaded.config), {"params": loaded.params}
    assert policy.max_positions == 32
    tokens = np.ones((1, 33), np.int32)
    states = jax.jit(policy.prefill)(variables, tokens, np.arange(33)[None] >= 1).hidden
    assert np.isfinite(states).all()
    with pytest.raises(ValueError, match="at most 32 tokens"):
        policy.prefill(variables, tokens, np.ones((1, 33), bool))
    assert np.isnan(jax.jit(policy.prefill)(variables, tokens, np.ones((1, 33), bool)).hidden).all()


def test_experts_in_one_tensor_are_read_and_written_as_such(tmp_path):
    """As transformers holds them in memory; what it saves by default is a tensor for each expert."""
    model = reference.model("qwen3_moe")
    apart, together = tmp_path / "apart", tmp_path / "together"
    model.save_pretrained(apart)
    model.save_pretrained(together, save_original_format=False)
    loaded, other = (hf.load_folder(folder, tokenizer=False) for folder in (apart, together))
    assert (loaded.params["layers"]["gate_experts"]["kernel"]).shape == (2, 4, 32, 24)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, other.params)
    hf.save_folder(tmp_path / "export", together, other.config, other.params)
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "export", together))
    assert mine.keys() == theirs.keys() and "model.layers.1.mlp.experts.gate_up_proj" in mine
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    assert all(torch.equal(exported[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("world", ["qwen3_moe"], indirect=True)
def test_a_token_does_not_depend_on_whose_experts_are_busy(world):
    """No expert has a limit that others could fill: more prompts in the batch, the same state."""
    _, loaded = world
    prefill = jax.jit(make_policy(loaded.config).prefill)
    tokens, mask = reference.group_batch()[:2]
    alone = prefill({"params": loaded.params}, tokens[:1], mask[:1]).hidden
    crowd = np.concatenate([tokens[:1], *[tokens[:1, ::-1]] * 7]), np.concatenate([mask[:1]] * 8)
    np.testing.assert_allclose(prefill({"params": loaded.params}, *crowd).hidden[:1], alone, atol=1e-5)
