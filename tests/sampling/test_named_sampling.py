"""Sampling settings that a config refuses; tests/runs/measuring/test_samples.py tests the others in a run."""

from types import SimpleNamespace

import pytest
from support.tiny_models import chat_tokenizer

from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.rollout.encoding import policy_tokens
from grpo_jax.sampling.samplers import stops_of


@pytest.mark.parametrize(
    ("forbidden", "message"),
    [
        ([0.5], r"forbidden_tokens\[0\]: expected"),
        (["tree"], r"'tree' is \[.*\]: name one token"),
        ([259], r"259 is \[259\]: name one token by text or by id, in \[0, 259\), that ends no completion"),
        (["<|im_end|>"], "that ends no completion"),
        (list(range(258)), "no token is left to write"),
    ],
)
def test_tokens_that_cannot_be_forbidden(forbidden, message):
    tokenizer = chat_tokenizer()
    folder = SimpleNamespace(
        tokenizer=tokenizer,
        config=SimpleNamespace(vocab_size=259),
        eos_ids=tokenizer.convert_tokens_to_ids(["<|im_end|>"]),
    )
    with pytest.raises(UserError, match=message):
        policy_tokens(make_config(task="text", data={"forbidden_tokens": forbidden}), folder)


def test_stop_strings_that_no_text_shows():
    with pytest.raises(UserError, match=r"sampling.stop: expected texts that are not empty"):
        make_config(task="text", sampling={"stop": [""]})
    with pytest.raises(UserError, match=r"no text shows the special token <\|im_end\|>"):
        stops_of([". <|im_end|>"], chat_tokenizer(), 272)

    class Shouting:
        """A tokenizer whose texts depend on how long they are."""

        def __init__(self):
            self.inner = chat_tokenizer()

        def __len__(self):
            return len(self.inner)

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def decode(self, tokens, **options):
            text = self.inner.decode(tokens, **options)
            return text.upper() if len(tokens) > 2 else text

    with pytest.raises(UserError, match="does not write texts token by token"):
        stops_of(["x"], Shouting(), 272)
