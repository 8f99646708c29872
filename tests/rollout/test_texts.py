"""Texts as a policy reads and writes them, with tokenizers made here: prompts, allowed tokens, completions."""

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from grpo_jax.rollout.encoding import (
    as_is,
    completion_statistics,
    continued,
    make_decode,
)

CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %} nothink"
    "{% endif %}{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]


def word_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    words = [*SPECIAL, "[UNK]", "nothink", "a", "red", "fox", "in", "snow", "draw", "this:", "now", "été", "{x}", "!"]
    model = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        unk_token="[UNK]",
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=CHAT if chat else None,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, as Qwen's: one token per byte, spaces included."""
    alphabet = sorted(ByteLevel.alphabet())
    model = Tokenizer(BPE({symbol: i for i, symbol in enumerate([*alphabet, "<|end|>"])}, merges=[]))
    model.pre_tokenizer, model.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|end|>")


# ------------------------------------------------------------------------------------------------------- prompts


# --------------------------------------------------------------------------------------------------- completions


def test_appended_words_are_told_apart_from_the_prompt():
    """A word tokenizer writes no space before a text's first word: 'a fox' + 'in snow' was once 'a foxin snow'."""
    words, bytes_ = word_tokenizer(), byte_tokenizer()
    ids = words("in snow <|end|>")["input_ids"]
    assert make_decode(words, form="append", read=continued)(ids, "a fox") == (" in snow", ("a fox in snow", True))
    whole = make_decode(words, form="rewrite", read=as_is)
    assert whole(np.array(ids), "a fox") == ("in snow", ("in snow", True))
    ids = bytes_("es, été<|end|>")["input_ids"]
    assert make_decode(bytes_, form="append", read=continued)(ids, "a fox") == ("es, été", ("a foxes, été", True))


def test_statistics_by_hand():
    texts = [["A red fox", "a fox", "a fox"], ["red dog's bed", "a dog", "red sky"]]
    valid = [[True, False, False], [True, True, True]]
    result = completion_statistics(["a fox", "a dog"], texts, valid)
    by_hand = {"words": 14 / 6, "growth": 2 / 6, "duplicates": 1 / 6, "unchanged": 3 / 6, "invalid": 2 / 6}
    assert result == pytest.approx(by_hand)
