"""Stop strings: the completing token ends a completion, for any tokenisation."""

import dataclasses

import jax
import numpy as np
import pytest
from support.marked_tokenizers import TOKENIZERS
from support.tiny_decoders import LLAMA, drawn

from grpo_jax.models.policy import Policy
from grpo_jax.sampling.episodes import make_episode_sampler
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.samplers import START, stop_table, token_pieces
from grpo_jax.sampling.token_choice import SamplingParams

EOS, PAD = 3, 0
CONFIG = dataclasses.replace(LLAMA, num_layers=1, windows=(None,))
PARAMS = SamplingParams(4, 40)
PROMPTS = np.array([[0, 0, 9, 10, 11], [0, 0, 0, 12, 13], [14, 15, 16, 17, 18]], np.int32)
KEYS = jax.random.split(jax.random.key(5), len(PROMPTS))
SPELLED = ["a", "b", "ab", "ba", "c", "", "bab", "é"]
PIECES = [SPELLED[token % len(SPELLED)].encode() for token in range(64)]
STOPS = ["abba", "cc", "bé"]
TABLE = stop_table(STOPS, PIECES, PIECES)


def end_of(tokens, table):
    """The place of the token that completes a stop string, or None."""
    state = START
    for place, token in enumerate(tokens):
        state = table[state, token]
        if state == len(table):
            return place
    return None


def first_with(texts, stops):
    """The place of the first text that contains a stop string, or None."""
    return next((place for place, text in enumerate(texts) if any(stop in text for stop in stops)), None)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_ends_where_it_first_contains_a_stop_string_once_decoded(name):
    tokenizer = TOKENIZERS[name]()
    pieces = token_pieces(tokenizer, len(tokenizer) + 3)
    assert pieces.later[len(tokenizer) :] == [b""] * 3  # a model may have more tokens than its tokenizer
    stops = ["e f", "ox", "d fox", "\n", "é", "oo"]
    table = stop_table(stops, pieces.first, pieces.later)
    # A run of SentencePiece's bytes that is no character is a run of replacement marks, line ends in it included.
    whole = [token for token in range(len(tokenizer)) if name != "llama2" or max(pieces.later[token], default=0) < 128]
    spoken = tokenizer("a red fox oo describes", add_special_tokens=False)["input_ids"]
    rng, ends = np.random.default_rng(0), []
    for _ in range(150):
        tokens = rng.choice(whole, 10)
        tokens[5:] = rng.choice(spoken, 5)
        read = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        expected = first_with([tokenizer.decode(tokens[: n + 1], **read) for n in range(10)], stops)
        assert end_of(tokens, table) == expected, tokens
        ends.append(expected)
    assert {None} < set(ends) and len(set(ends)) > 4


def test_a_character_of_several_tokens_completes_a_stop_string_with_its_last():
    pieces = token_pieces(tokenizer := TOKENIZERS["qwen2"](), 259)
    tokens = tokenizer("café!", add_special_tokens=False)["input_ids"]
    assert len(tokens) == 6
    assert end_of(tokens, stop_table(["fé"], pieces.first, pieces.later)) == 4


def sampler(stops=None, make=make_sampler, **changes):
    params = dataclasses.replace(PARAMS, **changes)
    return make(Policy(CONFIG), params, eos_ids=(EOS,), pad_id=PAD, stops=stops)


def cut(samples, stops):
    """Samples as if sampling had ended with the first stop string; and how many it ended."""
    tokens, mask, logprobs, sampler_logprobs, truncated = (np.array(array) for array in samples[:5])
    stopped = 0
    for p, g in np.ndindex(truncated.shape):
        written = tokens[p, g][mask[p, g]]
        texts = [b"".join(PIECES[token] for token in written[: n + 1]).decode() for n in range(len(written))]
        end = first_with(texts, stops)
        if end is not None:
            tokens[p, g, end + 1 :], mask[p, g, end + 1 :], truncated[p, g] = PAD, False, False
            logprobs[p, g, end + 1 :], sampler_logprobs[p, g, end + 1 :] = 0, 0
            stopped += end + 1 < len(written)
    return samples._replace(
        tokens=tokens, mask=mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs, truncated=truncated
    ), stopped


def assert_same(came, expected):
    for name in ("tokens", "mask", "truncated"):
        np.testing.assert_array_equal(getattr(came, name), getattr(expected, name), err_msg=name)
    for name in ("logprobs", "sampler_logprobs"):
        np.testing.assert_allclose(getattr(came, name), getattr(expected, name), atol=1e-5, err_msg=name)


def test_completions_are_those_without_stop_strings_cut_behind_the_first():
    variables = drawn(CONFIG)
    free = sampler(top_k=40)(variables, PROMPTS, PROMPTS > 0, KEYS)
    expected, stopped = cut(free, STOPS)
    came = sampler(TABLE, top_k=40)(variables, PROMPTS, PROMPTS > 0, KEYS)
    assert_same(came, expected)
    lengths = np.asarray(came.mask).sum(-1)
    assert stopped >= 4 and not np.asarray(came.truncated).all() and len(np.unique(lengths)) > 3


def test_each_turn_looks_for_stop_strings_in_its_own_text():
    """A stop string begun in one turn and completed in the next is none, and the answer between is not looked at."""
    variables, active = drawn(CONFIG), np.ones((3, 4), bool)
    said = np.full((3, 4, 2), 4, np.int32)  # "cc"
    # No stop string is as short as a token: the first turn is the same without any.
    _, carried = sampler(TABLE, make_episode_sampler, max_new_tokens=1).begin(variables, PROMPTS, PROMPTS > 0, KEYS)
    free, came = (
        sampler(stops, make_episode_sampler, max_new_tokens=12).go_on(variables, carried, said, said > 0, KEYS, active)[
            0
        ]
        for stops in (None, TABLE)
    )
    expected, stopped = cut(free, STOPS)
    assert stopped
    assert_same(came, expected)
