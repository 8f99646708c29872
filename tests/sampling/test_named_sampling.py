"""What a config says of sampling holds in a run: in training, in what is measured, and in `predict`."""

from types import SimpleNamespace

import pyarrow.parquet
import pytest
from support.text_task import steered_run
from support.tiny_models import chat_tokenizer

from grpo_jax import load_rewriter
from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.rollout.encoding import policy_tokens
from grpo_jax.runs.policy import run_config
from grpo_jax.sampling.samplers import stops_of


@pytest.fixture(scope="module")
def run(place):
    return steered_run(place)


@pytest.fixture(scope="module")
def section(run):
    return run_config(run).sampling


def test_completions_are_as_the_config_says(run, section):
    table = pyarrow.parquet.read_table(run / "completions" / "step_000001.parquet").to_pylist()
    stops, texts = section.stop, [row["raw_completion"] for row in table]
    assert not any(letter in text for text in texts for letter in "bcdefg")
    stopped = [text for text in texts if any(stop in text for stop in stops)]
    assert len(stopped) > 5
    for text in stopped:  # nothing behind it: the stop string is complete with the last token
        assert any(text.endswith(stop) for stop in stops) and not any(stop in text[:-1] for stop in stops)
    # Every token is a byte: a text of so many tokens without a stop string was cut, or ended by itself.
    assert not any(row["truncated"] for row in table if row["raw_completion"] in stopped)


def test_predict_honours_it_too(run, section):
    rewrite = load_rewriter(run)
    texts = [rewrite(f"{letter} tree") for letter in "abcdef"]
    assert not any(stop in text[:-1] for stop in section.stop for text in texts)
    assert not any(letter in text for text in texts for letter in "bcdefg")
    assert any(texts)


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
