"""Answers in the form of a JSON object: the automaton, and what is sampled and trained under it."""

import itertools
import json
import re

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from support.marked_tokenizers import TOKENIZERS
from support.tiny_decoders import tiny

from grpo_jax.core.form import json_moves
from grpo_jax.core.trie import ROOT, children, follow, walk
from grpo_jax.models.hf.pieces import Pieces, token_pieces
from grpo_jax.sampling.sampler import make_sampler
from grpo_jax.sampling.samplers import text_form
from grpo_jax.sampling.token_choice import SamplingParams

HALVES, STEPS = [f"{half / 2:.1f}" for half in range(3, 22)], [str(number) for number in range(8, 13)]
FIELDS = [("prompt", None), ("guidance", HALVES), ("negative", None), ("steps", STEPS)]
WRITTEN = re.compile(r'\{"prompt": ".*", "guidance": \d+\.\d, "negative": ".*", "steps": \d+\}', re.DOTALL)


def accepts(moves, text):
    state = 0
    for byte in text:
        state = moves[state, byte]
        if state < 0:
            return False
    return state == len(moves) - 1


def is_in_form(text):
    """By json.loads, with no automaton: the fields in their order, values listed, as `json.dumps` puts them."""
    try:
        pairs = json.loads(text, object_pairs_hook=list, parse_float=str, parse_int=str)
        written = text.decode()
    except ValueError:
        return False
    if not isinstance(pairs, list) or [pair[0] for pair in pairs if isinstance(pair, tuple)] != [f[0] for f in FIELDS]:
        return False
    if not WRITTEN.fullmatch(written) or re.search(r"\\[^\"\\/]|\x7f", written.replace("\\\\", "")):
        return False
    return all(
        isinstance(v, str) and (known is None or v in known) for (_, v), (_, known) in zip(pairs, FIELDS, strict=True)
    )


def changed(rng, text):
    """A text with bytes left out, put in or exchanged, half of the times marks of JSON."""
    for _ in range(rng.integers(0, 3)):
        place = rng.integers(0, len(text) + 1)
        byte = bytes([rng.integers(0, 256) if rng.random() < 0.5 else rng.choice(list(b'"\\{},:. 0123456789u/n'))])
        text = text[:place] + (byte if rng.random() < 0.7 else b"") + text[place + rng.integers(0, 2) :]
    return text


def test_the_automaton_accepts_what_json_and_the_lists_do():
    moves, rng, verdicts = json_moves(FIELDS), np.random.default_rng(0), []
    characters = [*'ab "\\/é€𝄞', "\x7f", "\n", "\ud7ff", "\ue000", "\U0010ffff"]
    for _ in range(4000):
        strings = ["".join(rng.choice(characters, rng.integers(0, 5))) for _ in range(2)]
        number = rng.choice([*HALVES, "11.0", "1.0", "2", "2.25"], p=[0.9 / 19] * 19 + [0.025] * 4)
        steps = rng.choice([*STEPS, "7", "13", "1", "08"], p=[0.18] * 5 + [0.025] * 4)
        quoted = [json.dumps(string, ensure_ascii=rng.random() < 0.1) for string in strings]
        text = f'{{"prompt": {quoted[0]}, "guidance": {number}, "negative": {quoted[1]}, "steps": {steps}}}'
        text = changed(rng, text.encode())
        verdicts.append(accepts(moves, text))
        assert verdicts[-1] == is_in_form(text), text
    assert 500 < sum(verdicts) < 3500


def test_every_two_bytes_of_a_string_are_those_that_utf_8_has():
    moves = json_moves([("a", None)])
    for head in itertools.product(range(0x80, 256), repeat=2):
        for tail in (b"", b"\x80", b"\xbf\xbf"):
            text = bytes(head) + tail
            try:
                text.decode()
                valid = True
            except ValueError:
                valid = False
            assert accepts(moves, b'{"a": "' + text + b'"}') == valid, text


SPELLED = [*'{}"\\:,. 0123456789abgdcentivmprosuf', '{"', '": ', ', "', "prompt", '"}', '", "', "1.5, ", 'a"', "\x00"]
PIECES = Pieces(*[[SPELLED[t].encode() if t < len(SPELLED) else b"" for t in range(64)]] * 2)
PROMPTS = np.array([[0, 0, 9, 10, 11], [0, 0, 0, 12, 13], [14, 15, 16, 17, 18]], np.int32)
COMPILED = "/jax/core/compile/backend_compile_duration"
SMALL = [("prompt", None), ("guidance", ["1.5", "2.0", "10.0"]), ("steps", STEPS)]


def form_of(most, fields=SMALL):
    return text_form(json_moves(fields), PIECES, np.ones(64, bool), most=most)


def fewest_tokens():
    """Tokens of the shortest answer, by dynamic programming over texts."""

    def tokens_of(text):
        best = [0] + [np.inf] * len(text)
        for end in range(1, len(text) + 1):
            pieces = [p for p in SPELLED if text.endswith(p, 0, end)]
            best[end] = min((1 + best[end - len(p)] for p in pieces), default=np.inf)
        return best[-1]

    written = [json.dumps({"prompt": "", "guidance": float(g), "steps": int(s)}) for g in SMALL[1][1] for s in STEPS]
    return int(min(map(tokens_of, written)))


def test_tokens_exist_where_the_text_can_go_on_and_end_in_time():
    """Against a search over bytes and tokens that knows of no kinds and no table."""
    moves, most = json_moves([("a", None), ("n", ["1", "10"])]), 14
    form = text_form(moves, PIECES, np.arange(64) != SPELLED.index('"}'), most=most)
    end = len(moves) - 1

    def leads(state, token):
        for byte in PIECES.later[token]:
            state = moves[state, byte] if state >= 0 else -1
        return state if PIECES.later[token] and token != SPELLED.index('"}') else -1

    to = [[leads(state, token) for token in range(64)] for state in range(len(moves))]
    ends = [{end}]  # the states from which a text ends in so many tokens
    for _ in range(most):
        ends.append({s for s in range(len(moves)) if any(to[s][t] in ends[-1] for t in range(64))})
    waiting, met = [(0, 0, ROOT)], set()
    for state, written, node in waiting:
        left = most - written
        soon = set().union(*ends[:left]) if left else set()
        expected = [t for t in range(64) if to[state][t] in soon]
        assert np.flatnonzero(children(form, node)).tolist() == expected
        reached = np.asarray(follow(form, node, np.arange(64)))
        assert np.flatnonzero(reached >= 0).tolist() == expected
        assert (int(form.text[node]) == 0) == (state == end)
        for token in expected:
            if (to[state][token], written + 1) not in met:
                met.add((to[state][token], written + 1))
                waiting.append((to[state][token], written + 1, int(reached[token])))
    assert any(state == end and written == most for state, written in met) and len(met) > 60


def test_every_answer_of_a_random_policy_is_whole_and_in_form():
    variables, policy, fewest = tiny("llama").variables, tiny("llama").policy, fewest_tokens()
    lengths, compiled = set(), []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    for most, changes in ((fewest, {"temperature": 0.0}), (40, {"top_k": 3})):
        sample = make_sampler(policy, SamplingParams(8, most, **changes), eos_ids=(), pad_id=0, trie=form_of(most))
        for key in range(3):
            keys, before = jax.random.split(jax.random.key(key), 3), compiled.count(COMPILED)
            samples = jax.device_get(sample(variables, PROMPTS, PROMPTS > 0, keys))
            assert (compiled.count(COMPILED) == before) == (key > 0)
            assert not samples.truncated.any()
            rows = np.reshape(samples.tokens, (-1, most)), np.reshape(samples.mask, (-1, most))
            for tokens, mask in zip(*rows, strict=True):
                fields = json.loads(b"".join(PIECES.later[token] for token in tokens[mask]))
                assert list(fields) == ["prompt", "guidance", "steps"]
                assert fields["guidance"] in (1.5, 2, 10) and fields["steps"] in range(8, 13)
                lengths.add(int(mask.sum()))
    assert len(lengths) > 3
    with pytest.raises(ValueError, match=f"no text can be written in {fewest - 1} tokens"):
        form_of(fewest - 1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_update_compute_one_distribution(temperature):
    """Log-probabilities are those of softmax over the tokens that exist; forced tokens have 0 and no entropy."""
    variables, policy, form = tiny("llama").variables, tiny("llama").policy, form_of(40)
    sample = make_sampler(policy, SamplingParams(4, 40, temperature), eos_ids=(), pad_id=0, trie=form)
    samples = jax.device_get(sample(variables, PROMPTS, PROMPTS > 0, jax.random.split(jax.random.key(1), 3)))
    hidden = policy.forward_group(variables, PROMPTS, PROMPTS > 0, samples.tokens, samples.mask)
    logprobs, entropy = policy.token_logprobs(variables, hidden, samples.tokens, trie=form, temperature=temperature)
    mask = samples.mask
    np.testing.assert_allclose(np.asarray(logprobs)[mask], samples.logprobs[mask], atol=2e-5)
    np.testing.assert_array_equal(samples.logprobs, samples.sampler_logprobs)
    logits = np.asarray(policy.logits("pgtd,vd->pgtv", hidden, policy.head(variables)), np.float64) / temperature
    exists = np.asarray(children(form, walk(form, samples.tokens)))
    logits = np.where(exists, logits, -np.inf)[mask]
    logs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    np.testing.assert_allclose(
        np.asarray(logprobs)[mask], np.take_along_axis(logs, samples.tokens[mask][:, None], -1)[:, 0], atol=2e-5
    )
    forced = exists[mask].sum(-1) == 1
    assert (
        forced.any() and (samples.logprobs[mask][forced] == 0).all() and (np.asarray(entropy)[mask][forced] == 0).all()
    )


@pytest.mark.parametrize("name", ["qwen2", "llama3", "llama2"])
def test_a_tokenizers_own_tokens_write_the_form(name):
    """What the automaton lets a tokenizer write is, decoded, in form, and some tokenizers write parts of characters."""
    tokenizer = TOKENIZERS[name]()
    size = len(tokenizer) + 2
    form = text_form(json_moves(SMALL), token_pieces(tokenizer, size), np.ones(size, bool), most=120)
    rng, step = np.random.default_rng(0), jax.jit(lambda node: children(form, node))
    for _ in range(8):
        node, tokens = jnp.int32(ROOT), []
        while int(form.text[node]) < 0:
            tokens.append(int(rng.choice(np.flatnonzero(step(node)))))
            node = follow(form, node, tokens[-1])
        text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert list(json.loads(text)) == ["prompt", "guidance", "steps"] and "\ufffd" not in text
