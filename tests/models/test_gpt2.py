"""What GPT-2 has for itself: positions that end, a prefix that the hub leaves out, transformers' greedy tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from support import tiny_models  # noqa: E402
from support import torch_reference as reference  # noqa: E402

from grpo_jax import train  # noqa: E402
from grpo_jax.models import hf  # noqa: E402
from grpo_jax.models.policy import make_policy  # noqa: E402
from grpo_jax.sampling.sampler import SamplingParams, make_sampler  # noqa: E402

SCALED = dict(scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return reference.folder(tmp_path_factory.mktemp("gpt2") / "source", "gpt2", **SCALED)


@pytest.fixture(scope="module")
def loaded(source):
    return hf.load_folder(source, tokenizer=False)


def test_what_is_longer_than_the_positions_is_refused(loaded):
    """63 and 1 tokens fit into 64 positions, and padding does not count."""
    policy, variables = make_policy(loaded.config), {"params": loaded.params}
    sample = make_sampler(policy, SamplingParams(1, 1), eos_ids=(5,), pad_id=0)
    tokens, mask, key = np.ones((1, 70), np.int32), np.arange(70)[None] >= 7, jax.random.split(jax.random.key(0), 1)
    assert sample(variables, tokens, mask, key).mask.all()
    mask = np.arange(70)[None] >= 6
    with pytest.raises(ValueError, match=r"at most 64 tokens.*prompt of 64 tokens and max_new_tokens = 1"):
        sample(variables, tokens, mask, key)
    completion = np.ones((1, 1, 1), np.int32), np.ones((1, 1, 1), bool)
    with pytest.raises(ValueError, match="at most 64 tokens"):
        policy.forward_group(variables, tokens, mask, *completion)
    with pytest.raises(ValueError, match="at most 64 tokens"):
        policy.prefill(variables, tokens, np.ones((1, 70), bool))
    # Under jit the mask is not known: what cannot be is not a number, rather than wrong.
    assert bool(jnp.isnan(jax.jit(policy.prefill)(variables, tokens, np.ones((1, 70), bool)).hidden).all())


def test_the_command_says_so_before_anything_runs(tmp_path, capsys):
    reference.folder(tmp_path / "policy", "gpt2", vocab_size=300, **SCALED)
    tiny_models.chat_tokenizer().save_pretrained(tmp_path / "policy")
    (tmp_path / "prompts.txt").write_text("".join(f"{c} tree\n" for c in "abcdefghijklmnopqrstuvwxyz"))
    (tmp_path / "judge.py").write_text("def brief(completions):\n    return [-len(text) for text in completions]\n")
    arguments = ["--task", "text", "--policy.path", str(tmp_path / "policy"), "--sampling.max_new_tokens", "8"]
    arguments += [
        "--data.prompts",
        str(tmp_path / "prompts.txt"),
        "--rewards",
        f"[{{name: {tmp_path}/judge.py:brief}}]",
    ]
    assert train.main([*arguments, "--run_dir", str(tmp_path / "run"), "--data.max_prompt_tokens", "57"]) == 2
    shown = "".join(capsys.readouterr())
    for message in ("data.max_prompt_tokens = 57", "65 tokens", "64 only"):
        assert message in " ".join(shown.split())
    assert "Traceback" not in shown
