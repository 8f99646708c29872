"""What a config says of sampling holds in a run: in training, in what is measured, and in `predict`."""

from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
from support.text_task import rows as metrics_of
from support.text_task import steered_run
from support.tiny_models import chat_tokenizer

from grpo_jax import load_rewriter
from grpo_jax.config import make_config
from grpo_jax.errors import UserError
from grpo_jax.rollout.texts import policy_tokens
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
    rows, stops = [row for row in table if not row["kept_prompt"]], section.stop
    texts = [row["completion"] for row in rows]
    assert not any(letter in text for text in texts for letter in "bcdefg")
    stopped = [text for text in texts if any(stop in text for stop in stops)]
    assert len(stopped) > 5
    for text in stopped:  # nothing behind it: the stop string is complete with the last token
        assert any(text.endswith(stop) for stop in stops) and not any(stop in text[:-1] for stop in stops)
    # Every token is a byte: a text of so many tokens without a stop string was cut, or ended by itself.
    assert not any(row["truncated"] for row in rows if row["completion"] in stopped)
    ended = [row["length"] for row in rows if not row["truncated"] and row["completion"] not in stopped]
    assert all(length > section.min_new_tokens for length in ended)


def test_what_was_written_and_which_prompts_were_kept_is_told(run, section):
    table = pyarrow.parquet.read_table(run / "completions" / "step_000001.parquet").to_pylist()
    (metrics,) = metrics_of(run)
    written = [row for row in table if not row["kept_prompt"]]
    kept = [row for row in table if row["kept_prompt"]]
    assert len(written) == 4 * section.written_completions and len(kept) == 4 * section.keep_prompt
    assert all(row["text"] == row["prompt"] and row["length"] == 0 and row["usable"] for row in kept)
    assert metrics["reward/letters/mean"] == pytest.approx(np.mean([row["reward/letters"] for row in written]))
    assert metrics["completion_tokens"] == np.mean([row["length"] for row in written]) > 0
    totals = [row["reward/letters"] + 0.5 * row["reward/brief"] for row in kept]
    assert metrics["kept_prompt/total/mean"] == pytest.approx(np.mean(totals), rel=1e-6)
    assert metrics["unchanged"] == 0


def test_predict_honours_it_too(run, section):
    rewrite = load_rewriter(run)
    texts = [rewrite(f"{letter} tree") for letter in "abcdef"]
    assert not any(stop in text[:-1] for stop in section.stop for text in texts)
    assert not any(letter in text for text in texts for letter in "bcdefg")
    assert any(texts) and all(len(set(text)) > 1 for text in texts if len(text) > 4)


@pytest.mark.parametrize(
    ("forbidden", "message"),
    [
        ([0.5], r"forbidden_tokens\[0\]: expected"),
        (["tree"], "'tree' is 4 tokens"),
        ([259], r"259 is not in \[0, 259\)"),
        (["<|im_end|>"], "'<|im_end|>' ends completions".replace("|", r"\|")),
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


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"stop": [""]}, "sampling.stop: expected texts that are not empty"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, r"sampling.min_new_tokens: expected a number in \[0, "),
        ({"repetition_penalty": 0}, "sampling.repetition_penalty: expected a number > 0"),
    ],
)
def test_values_out_of_range(section, message):
    with pytest.raises(UserError, match=message):
        make_config(task="text", sampling=section)


def test_stop_strings_that_no_text_shows():
    with pytest.raises(UserError, match=r"'\. <\|im_end\|>' holds the special token <\|im_end\|>"):
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
