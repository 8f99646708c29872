"""The small policy of a world of words: its tokenizer, and equal loading by both libraries."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.config.sections import NewPolicySection
from grpo_jax.models.random_init import write_policy
from grpo_jax.tasks.recommendation.catalogue import plain
from grpo_jax.tasks.recommendation.dataset import make_catalogue_of_words

CATALOGUE = make_catalogue_of_words(560)
WORDS = tuple(dict.fromkeys(" ".join(CATALOGUE.titles).split()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_policy(
        tmp_path_factory.mktemp("policy") / "new", [*WORDS, ",", WORDS[0]], NewPolicySection(width=32, heads=2)
    )


def test_every_word_is_a_token_and_reads_back(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == len(WORDS) + 5
    title = CATALOGUE.titles[-1]
    ids = tokenizer(title)["input_ids"]
    assert len(ids) == 4 and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == title
    assert tokenizer("zebra")["input_ids"] == [tokenizer.unk_token_id]
    chat = [{"role": "user", "content": title}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert prompt == [*ids, tokenizer.convert_tokens_to_ids("<|next|>")]
    whole = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": f" {title}"}], tokenize=False)
    assert tokenizer(whole, add_special_tokens=False)["input_ids"] == [*ids, *ids, tokenizer.eos_token_id]


def test_titles_of_every_script_are_plain_words_of_the_tokenizer(tmp_path):
    """Python splits words at vowel signs and lowers a last sigma otherwise than the tokenizer."""
    from transformers import AutoTokenizer

    titles = ["हिन्दी किताब", "ภาษาไทยดี", "İstanbul Lamp", "ΠΟΛΗΣ", "cafe\u0301 noir", "Crème ½ x² No. 5!", "日本語 ❤️"]
    words = [word for title in titles for word in plain(title).split()]
    write_policy(tmp_path, words, NewPolicySection(width=32, heads=2), plain_words=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for title in titles:
        ids = tokenizer(title)["input_ids"]
        assert ids and tokenizer.unk_token_id not in ids
        assert plain(tokenizer.decode(ids)) == plain(title)
    assert plain("Crème ½ x² No. 5!") == "crème x no 5"


def test_both_libraries_load_it_and_agree(tmp_path):
    from transformers import AutoModelForCausalLM

    torch = pytest.importorskip("torch")
    from grpo_jax.models.policy import load_policy

    policy = load_policy(write_policy(tmp_path, WORDS, NewPolicySection(width=32, heads=2, window=10)))
    assert policy.eos_ids == (1,) and policy.pad_id == 0
    tokens = np.arange(4, 14)[None]
    hidden = jax.jit(policy.prefill)(policy.variables, tokens, np.ones(tokens.shape, bool)).hidden
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor(tokens)).logits[:, -1]
    np.testing.assert_allclose(hidden @ policy.head(policy.variables).T, theirs.numpy(), atol=1e-5)


def test_vectors_begin_by_a_mean_in_which_newer_words_weigh_more(tmp_path):
    """Nine words along axes of their own: how much of each is in what the policy says next."""
    from grpo_jax.models.policy import load_policy

    words = [f"w{place}" for place in range(9)]
    vectors = dict(zip(words, np.eye(9, 64, dtype=np.float32), strict=True))
    section = NewPolicySection(width=64, layers=1, heads=2, mlp=4, window=10)
    folder = write_policy(tmp_path, words, section, vectors=vectors)
    assert json.loads((folder / "config.json").read_text())["intermediate_size"] == 4
    policy = load_policy(folder)
    history = jnp.asarray([[*range(4, 13), 3]])
    hidden = jax.jit(policy.forward_group)(
        policy.variables, history, history > 0, jnp.zeros((1, 1, 1), int), jnp.ones((1, 1, 1), bool)
    )[0, 0, 0]
    shares = np.asarray(policy.head(policy.variables)[4:13] @ hidden)
    ratios = shares[:-1] / shares[1:]
    assert (ratios[-4:] > 0.3).all() and (ratios[-4:] < 0.75).all() and shares[:5].max() < shares[5]


def test_a_seed_is_a_policy(tmp_path):
    files = [write_policy(tmp_path / name, ["a", "b"], seed=seed) for name, seed in (("x", 1), ("y", 1), ("z", 2))]
    weights = [(path / "model.safetensors").read_bytes() for path in files]
    assert weights[0] == weights[1] != weights[2]
