"""What a config says of sampling holds in a run: in training, in what is measured, and in `predict`."""

import numpy as np
import pyarrow.parquet
import pytest
import yaml
from support.text_task import train_here
from support.tiny_models import chat_tokenizer

from grpo_jax import load_rewriter
from grpo_jax.config import make_config
from grpo_jax.errors import UserError
from grpo_jax.rollout.texts import without_forbidden
from grpo_jax.sampling.samplers import stops_of

STOPS = [*"0123456789", "aa", *"ABCDEFGH"]
FORBIDDEN = ["b", *"cdefg", 40]
FEWEST = 3


@pytest.fixture(scope="module")
def run(place, tmp_path_factory):
    """Two iterations with stop strings, a shortest length, a penalty and forbidden tokens."""
    folder = tmp_path_factory.mktemp("named_sampling")
    values = yaml.safe_load(place.config.read_text())
    values["sampling"] |= {"max_new_tokens": 12, "stop": STOPS, "min_new_tokens": FEWEST, "repetition_penalty": 1.5}
    values["data"] |= {"forbidden_tokens": FORBIDDEN}
    values["algorithm"] = {"kl_coef": 0.1, "importance_cap": 2.0}
    values["training"] = {"prompts_per_batch": 4, "max_steps": 2, "save_every": 0}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    assert train_here(folder / "config.yaml", folder / "run") == 0
    return folder / "run"


def test_completions_are_as_the_config_says(run):
    tables = [pyarrow.parquet.read_table(path).to_pylist() for path in sorted((run / "completions").iterdir())]
    rows = [row for table in tables for row in table]
    texts = [row["completion"] for row in rows]
    assert not any(letter in text for text in texts for letter in "bcdefg")
    stopped = [text for text in texts if any(stop in text for stop in STOPS)]
    assert len(stopped) > 5
    for text in stopped:  # nothing behind it: the stop string is complete with the last token
        assert any(text.endswith(stop) for stop in STOPS) and not any(stop in text[:-1] for stop in STOPS)
    # Every token is a byte: a text of so many tokens without a stop string was cut, or ended by itself.
    assert not any(row["truncated"] for row in rows if row["completion"] in stopped)
    ended = [row["length"] for row in rows if not row["truncated"] and row["completion"] not in stopped]
    assert all(length > FEWEST for length in ended)


def test_predict_honours_it_too(run):
    rewrite = load_rewriter(run)
    texts = [rewrite(f"{letter} tree") for letter in "abcdef"]
    assert not any(stop in text[:-1] for stop in STOPS for text in texts)
    assert not any(letter in text for text in texts for letter in "bcdefg")
    assert any(texts) and all(len(set(text)) > 1 for text in texts if len(text) > 4)


@pytest.mark.parametrize(
    ("forbidden", "message"),
    [
        ([0.5], r"forbidden_tokens\[0\]: expected"),
        (["tree"], "'tree' is 4 tokens"),
        ([272], r"272 is not in \[0, 272\)"),
        (["<|im_end|>"], "'<|im_end|>' ends completions".replace("|", r"\|")),
        (list(range(258)), "no token is left to write"),
    ],
)
def test_tokens_that_cannot_be_forbidden(forbidden, message):
    tokenizer = chat_tokenizer()
    eos_ids = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    with pytest.raises(UserError, match=message):
        given = make_config(task="text", data={"forbidden_tokens": forbidden}).data.forbidden_tokens
        without_forbidden(np.arange(272) < 259, given, tokenizer, vocab_size=272, eos_ids=eos_ids)


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
