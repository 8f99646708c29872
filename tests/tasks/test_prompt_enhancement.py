"""Prompts, forms, parsing and picture rewards, against slow loops and tokenizers made here."""

import json
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from grpo_jax.config.command_line import parse
from grpo_jax.errors import UserError
from grpo_jax.models.hf import load_folder
from grpo_jax.rollout.data import (
    Row,
    batch_at,
    batches_per_epoch,
    epoch_order,
    noise_seed,
    repeat_rows,
    split_rows,
)
from grpo_jax.rollout.prompts import TIERS, builtin_rows, load_prompts, make_prompt_set
from grpo_jax.tasks.prompt_enhancement import rewards as image_rewards
from grpo_jax.tasks.prompt_enhancement.rewriting import (
    INSTRUCTION,
    allowed_tokens,
    decode_completion,
    format_prompt,
    most_added_words,
    pad_left,
    parse_rewrite,
    rewrite_statistics,
)
from grpo_jax.train import main

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


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------------------------ reading


def test_jsonl_rows_carry_line_numbers_and_columns(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('\ufeff{"prompt": " été  ", "answer": 7}\n\n{"prompt": "b", "tags": ["x"]}\n', encoding="utf-8")
    assert load_prompts(path, held_out=0).train == (Row(1, "été", {"answer": 7}), Row(3, "b", {"tags": ["x"]}))


def test_txt_has_one_prompt_per_line(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes(b"a red fox\r\n  \r\n# not a comment\r\n")
    assert load_prompts(path, held_out=0).train == (Row(1, "a red fox"), Row(3, "# not a comment"))


def test_split_column_decides(tmp_path):
    records = [{"prompt": f"p{i}", "split": ["train", "validation", "test"][i % 3]} for i in range(7)]
    parts = load_prompts(write_jsonl(tmp_path / "p.jsonl", records), held_out=0.4)
    assert [[row.prompt for row in part] for part in parts] == [["p0", "p3", "p6"], ["p1", "p4"], ["p2", "p5"]]
    assert all("split" not in row.columns for part in parts for row in part)


def test_all_bad_lines_are_reported_at_once(tmp_path):
    path = tmp_path / "bad.jsonl"
    lines = [
        b'{"prompt": "fine", "split": "train"}',
        b'{"prompt": "x"',
        b'["x"]',
        b'{"text": "x"}',
        b'{"prompt": 3}',
        b'{"prompt": "  "}',
        b'{"prompt": "x", "split": "dev"}',
        b'{"prompt": "x", "images": 1}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "no split"}',
        b'{"prompt": "fine", "split": "test"}',
    ]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(UserError) as error:
        load_prompts(path)
    message = str(error.value)
    assert message.startswith(f"{path}: 10 bad lines")
    reasons = {
        2: "not JSON",
        3: "got list",
        4: "no \"prompt\" (it has 'text')",
        5: "must be text, got int",
        6: "is empty",
        7: "got 'dev'",
        8: "column 'images'",
        9: "not UTF-8",
        10: 'no "split"',
        11: "also a train prompt (line 1)",
    }
    for number, reason in reasons.items():
        assert any(f"line {number}:" in line and reason in line for line in message.splitlines()), (number, message)


def test_thousands_of_bad_lines_make_a_short_message(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("nonsense\n" * 5000)
    with pytest.raises(UserError, match="… and 4980 more") as error:
        load_prompts(path)
    assert len(str(error.value).splitlines()) == 22


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "does not exist"),
        ("empty.jsonl", "", "has no prompts"),
        ("blank.txt", "\n  \n", "has no prompts"),
        ("p.csv", "prompt\na", ".jsonl or a .txt"),
        ("one.txt", "a\na\n", "too few"),
        ("test.jsonl", '{"prompt": "a", "split": "test"}', 'no line with "split": "train"'),
    ],
)
def test_files_without_prompts_to_train_on(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        load_prompts(tmp_path / name)


def test_a_folder_is_no_prompt_file(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(UserError, match="cannot be read"):
        load_prompts(tmp_path / "folder.txt")


def test_builtin_tiers():
    everything = builtin_rows("builtin")
    assert len({row.prompt for row in everything}) == len(everything) == 120
    for tier in TIERS:
        rows = builtin_rows(f"builtin:{tier}")
        assert len(rows) == 40
        assert all(everything[row.id] == row and row.columns == {"tier": tier} for row in rows)
    assert [len(part) for part in load_prompts("builtin", held_out=0.1)] == [96, 12, 12]
    with pytest.raises(UserError, match="builtin:crowded"):
        builtin_rows("builtin:hard")


def test_rows_in_memory_get_ids_that_count_through():
    rows = [{"prompt": "a", "requested": {"colour": "red"}}, {"prompt": "b"}]
    parts = make_prompt_set(rows, [{"prompt": "c"}], [{"prompt": "d"}])
    assert [row.id for part in parts for row in part] == [0, 1, 2, 3]
    assert parts.train[0].columns == {"requested": {"colour": "red"}}
    assert "prompt" in rows[0]  # the caller's rows are left as they were
    with pytest.raises(UserError, match=r"row 1 of train: .*empty"):
        make_prompt_set([{"prompt": "a"}, {"prompt": ""}])
    with pytest.raises(UserError, match="no prompts to train on"):
        make_prompt_set([])


# ----------------------------------------------------------------------------------------------- splits and order


@given(st.lists(st.integers(0, 60), min_size=1, max_size=80), st.integers(0, 10), st.randoms())
def test_split_is_a_partition_that_ignores_order(numbers, held_out, random):
    rows = [Row(i, f"prompt {number}") for i, number in enumerate(numbers)]
    different = len(set(numbers))
    if 2 * held_out >= different:
        with pytest.raises(UserError, match="too few"):
            split_rows(rows, held_out=held_out)
        return
    parts = split_rows(rows, held_out=held_out)
    assert sorted(row.id for part in parts for row in part) == list(range(len(rows)))
    texts = [{row.prompt for row in part} for part in parts]
    assert not (texts[0] & texts[1] or texts[0] & texts[2] or texts[1] & texts[2])  # duplicates stay together
    assert [len(part) for part in texts] == [different - 2 * held_out, held_out, held_out]
    random.shuffle(rows)
    assert [{row.prompt for row in part} for part in split_rows(rows, held_out=held_out)] == texts


@pytest.mark.parametrize("held_out", [0.5, -0.1, -1, True, "0.2", float("nan")])
def test_held_out_is_a_count_or_a_share(held_out):
    with pytest.raises(ValueError, match="held_out"):
        split_rows([Row(0, "a")], held_out=held_out)


def test_epoch_orders_are_different_permutations_of_fixed_value():
    orders = [epoch_order(3, epoch, 50) for epoch in range(4)]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(50))
    assert len({tuple(order) for order in orders}) == 4
    np.testing.assert_array_equal(epoch_order(3, 2, 50), orders[2])
    assert tuple(epoch_order(4, 0, 50)) != tuple(orders[0])
    # Written down: a run that is resumed under another NumPy must see the same order.
    assert epoch_order(0, 0, 8).tolist() == [2, 6, 3, 5, 0, 1, 4, 7]


def test_batches_cover_an_epoch_without_repeats():
    n, size = 23, 4
    assert batches_per_epoch(n, size) == 5
    for epoch in range(3):
        seen = [batch_at(7, epoch * 5 + i, batch_size=size, n=n) for i in range(5)]
        np.testing.assert_array_equal(np.concatenate(seen), epoch_order(7, epoch, n)[:20])
    with pytest.raises(UserError, match="takes 24 different prompts and there are 23"):
        batch_at(7, 0, batch_size=24, n=n)


def test_noise_is_shared_by_a_prompt_fresh_in_training_and_fixed_in_evaluation():
    assert noise_seed(0, 1, 2) == noise_seed(0, 1, 2) == 2824755590193871601
    different = {noise_seed(s, i, p) for s in range(4) for i in range(20) for p in range(20)}
    assert len(different) == 1600
    assert all(0 <= seed < 2**63 for seed in different)
    assert noise_seed(0, 1, 2, evaluation=True) == noise_seed(0, 9, 2, evaluation=True)
    assert noise_seed(0, 0, 2, evaluation=True) != noise_seed(0, 0, 2)
    # Large numbers must not run into their neighbours: (2^32, 0) is not (0, 1).
    assert noise_seed(2**32, 0, 0) != noise_seed(0, 1, 0)
    with pytest.raises(ValueError, match="seeds"):
        noise_seed(-1, 0, 0)


def test_repeat_rows_fills_missing_columns_with_none():
    prompts, columns = repeat_rows([Row(0, "a", {"x": 1}), Row(1, "b", {"y": 2})], 2)
    assert prompts == ["a", "a", "b", "b"]
    assert columns == {"x": [1, 1, None, None], "y": [None, None, 2, 2]}


# -------------------------------------------------------------------------------------------------------- asking


def test_rewrite_goes_through_the_chat_template_without_thinking():
    tokenizer = word_tokenizer()
    ids = format_prompt(tokenizer, "a red fox", instruction="draw this: {prompt} now {x}")
    assert tokenizer.decode(ids) == "<|user|> draw this: a red fox now {x} <|end|> <|assistant|> nothink"
    assert tokenizer.decode(format_prompt(tokenizer, "a fox")) == "<|user|> a fox <|end|> <|assistant|> nothink"


def test_append_and_templateless_prompts_are_plain():
    assert format_prompt(word_tokenizer(), "a fox", form="append") == word_tokenizer()("a fox")["input_ids"]
    plain = word_tokenizer(chat=False)
    assert plain.decode(format_prompt(plain, "a fox", instruction="draw this: {prompt}")) == "draw this: a fox"


def test_an_instruction_must_say_where_the_prompt_goes():
    assert "{prompt}" in INSTRUCTION
    with pytest.raises(UserError, match=r"must contain \{prompt\}"):
        format_prompt(word_tokenizer(), "a", instruction="draw")


def test_pad_left_by_hand():
    tokens, mask = pad_left([[5], [6, 7, 8], []], 3, 9)
    assert tokens.tolist() == [[9, 9, 5], [6, 7, 8], [9, 9, 9]]
    assert mask.tolist() == [[False, False, True], [True] * 3, [False] * 3]
    assert (tokens.dtype, mask.dtype) == (np.int32, bool)
    with pytest.raises(ValueError, match="width"):
        pad_left([[1, 2, 3]], 2, 0)


def test_allowed_tokens_by_words():
    tokenizer = word_tokenizer()
    eos = tokenizer.eos_token_id

    def words(rule):
        allowed = allowed_tokens(tokenizer, rule, vocab_size=30, eos_ids=[eos])
        assert allowed.shape == (30,) and not allowed[len(tokenizer) :].any()
        return {tokenizer.convert_ids_to_tokens(int(i)) for i in np.flatnonzero(allowed)}

    plain = {"<|end|>", "nothink", "a", "red", "fox", "in", "snow", "draw", "this:", "now", "!"}
    assert words("english") == plain
    assert words("ascii") == plain | {"{x}"}
    assert allowed_tokens(tokenizer, "all", vocab_size=30, eos_ids=[eos]) is None
    with pytest.raises(ValueError, match="rule must be"):
        allowed_tokens(tokenizer, "french", vocab_size=30, eos_ids=[eos])
    with pytest.raises(UserError, match="no token"):
        allowed_tokens(tokenizer, "ascii", vocab_size=4, eos_ids=[eos])


def test_allowed_bytes_are_printable_ascii():
    tokenizer = byte_tokenizer()
    allowed = allowed_tokens(tokenizer, "ascii", vocab_size=len(tokenizer), eos_ids=[tokenizer.eos_token_id])
    written = {tokenizer.decode([int(i)]) for i in np.flatnonzero(allowed)} - {"<|end|>"}
    assert written == {chr(code) for code in range(0x20, 0x7F)}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("ascii", string.printable[:-5]), ("english", string.ascii_letters + string.digits + " .,;:!?'\"()-")],
    ids=["ascii", "english"],
)
def test_every_rule_can_be_named_and_allows_what_help_says(rule, expected, place, capsys):
    config = parse([f"--config={place.config}", f"--data.allowed_tokens={rule}"])
    loaded = load_folder(place.policy)  # a token for each byte, and a chat mark that is no named special token
    allowed = parts.allowed_tokens(config, loaded)
    written = {loaded.tokenizer.decode([int(i)]) for i in np.flatnonzero(allowed) if i not in loaded.eos_ids}
    assert written == set(expected) and allowed[list(loaded.eos_ids)].all()
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert '"ascii", those of printable ASCII characters alone' in told
    assert """"english", those of ASCII letters, digits, spaces and . , ; : ! ? ' " ( ) - alone""" in told


def test_another_rule_is_refused(place, capsys):
    assert main(["--config", str(place.config), "--data.allowed_tokens", "french"]) == 2
    error = capsys.readouterr().err
    assert "data.allowed_tokens" in error and all(rule in error for rule in ("all", "ascii", "english"))


# ------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("written", "prompt"),
    [
        ("a fox in snow", "a fox in snow"),
        ("  a   fox\tin snow \n", "a fox in snow"),
        ("<think>\nlet me see\n</think>\n\na fox", "a fox"),
        ("let me see</think>a fox", "a fox"),
        ('"a fox, snow."', "a fox, snow."),
        ("“a fox”", "a fox"),
        ('"a fox".', "a fox."),
        ('"a fox in', "a fox in"),
        ("'a dog's life'", "a dog's life"),
        ("'a dog' and 'a cat'", "'a dog' and 'a cat'"),
        ('"Hello" sign on a wall', '"Hello" sign on a wall'),
        ("a fox, 'sharp'", "a fox, 'sharp'"),
        ("Prompt: a fox", "a fox"),
        ("Enhanced prompt: Prompt: a fox", "a fox"),
        ("**Improved Prompt:** a fox", "a fox"),
        ("**Final prompt:**\n\na fox", "a fox"),
        ('Sure! Here is the rewritten prompt:\n\n"a fox"\n\nThis adds detail.', "a fox"),
        ("Here is a fox in snow", "Here is a fox in snow"),
        ("1. a fox\n2. a dog", "a fox"),
        ("- a fox", "a fox"),
        ("3 foxes", "3 foxes"),
        ("```\na fox\n```", "a fox"),
        ("...\na fox", "a fox"),
        ("狐", "狐"),
    ],
)
def test_rewrites_are_read(written, prompt):
    assert parse_rewrite(written, "rewrite", "the user's") == (prompt, True)


@pytest.mark.parametrize(
    "written",
    [
        "",
        " \n",
        '""',
        "...!",
        "<think>a fox is",
        "Here is the prompt:",
        "Prompt:",
        "I'm sorry, but no",
        "As an AI language model I",
        "I cannot",
        "```",
    ],
)
def test_unusable_rewrites_leave_the_prompt_unchanged(written):
    assert parse_rewrite(written, "rewrite", "the user's") == ("the user's", False)


@given(st.text(alphabet=st.sampled_from("a1 \n\"'`“”*:.-#>Prompt<think>/ü"), max_size=40))
def test_a_usable_rewrite_is_one_line_with_words(written):
    rewrite = parse_rewrite(written, "rewrite", "P!")
    if not rewrite.usable:
        assert rewrite.text == "P!"
    else:
        assert "\n" not in rewrite.text and rewrite.text == rewrite.text.strip()
        assert any(c.isalnum() for c in rewrite.text)


def test_append_is_the_prompt_and_the_first_line_of_its_continuation():
    assert parse_rewrite(", in snow\nNext", "append", "a fox") == ("a fox, in snow", True)
    assert parse_rewrite("es in snow", "append", "a fox") == ("a foxes in snow", True)
    for nothing in ("", " .", "\nin snow"):
        assert parse_rewrite(nothing, "append", "a fox") == ("a fox", False)


def test_text_is_judged_as_it_is():
    assert parse_rewrite(' "x"\n', "text", "a fox") == (' "x"\n', True)


def test_appended_words_are_told_apart_from_the_prompt():
    """A word tokenizer writes no space before a text's first word: 'a fox' + 'in snow' was once 'a foxin snow'."""
    words, bytes_ = word_tokenizer(), byte_tokenizer()
    ids = words("in snow <|end|>")["input_ids"]
    assert decode_completion(words, ids, "a fox", form="append") == (" in snow", ("a fox in snow", True))
    assert decode_completion(words, np.array(ids), "a fox", form="rewrite") == ("in snow", ("in snow", True))
    ids = bytes_("es, été<|end|>")["input_ids"]
    assert decode_completion(bytes_, ids, "a fox", form="append") == ("es, été", ("a foxes, été", True))


def test_rewrite_statistics_by_hand():
    texts = [["A red fox", "a fox", "a fox"], ["red dog's bed", "a dog", "red sky"]]
    usable = [[True, False, False], [True, True, True]]
    result = rewrite_statistics(["a fox", "a dog"], texts, usable)
    assert result.words == pytest.approx((3 + 2 + 2 + 3 + 2 + 2) / 6)
    assert result.growth == pytest.approx(2 / 6)
    assert result.duplicates == pytest.approx(1 / 6)
    assert result.unchanged == pytest.approx(3 / 6)
    assert result.unusable == pytest.approx(2 / 6)
    prompts, written = ["a fox"] * 3 + ["a dog"] * 3, [text for group in texts for text in group]
    assert most_added_words(prompts, written, top=3) == (("red", 3 / 6), ("bed", 1 / 6), ("dog's", 1 / 6))
    assert most_added_words(["a", "b"], ["a b b", "b"]) == (("b", 0.5),)


# ------------------------------------------------------------------------------------------------ picture rewards


class Judge:
    """A scorer whose space is simple: a picture's features are its channel means, a text's count r, g and b."""

    def image_features(self, images):
        return np.asarray(images, np.float64).mean((2, 3))

    def text_features(self, texts):
        return np.array([[1e-3 + text.count(letter) for letter in "rgb"] for text in texts])

    def cosine(self, a, b):
        return (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))

    def image_text(self, images, texts):
        return self.cosine(self.image_features(images), self.text_features(texts))

    def text_text(self, a, b):
        return self.cosine(self.text_features(a), self.text_features(b))


@pytest.fixture
def pictures():
    return np.random.default_rng(0).random((2, 4, 3, 2, 2)).astype(np.float32)


PROMPTS, REWRITES = ["rr g", "rr g", "b", "b"], ["rg", "rr g", "r", "bbb"]


def test_alignment_is_against_the_users_prompt(pictures):
    """Scored against the rewrite, writing what the picture shows anyway would pay."""
    judge, (images, baseline) = Judge(), pictures
    rewards = image_rewards.alignment(judge)(PROMPTS, REWRITES, images=images, baseline_images=baseline)
    for i, reward in enumerate(rewards):
        a = np.array([images[i, c].mean(dtype=np.float64) for c in range(3)])
        b = np.array([PROMPTS[i].count(letter) + 1e-3 for letter in "rgb"])
        assert reward == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)))


def test_gain_is_over_the_unchanged_prompts_picture(pictures):
    judge, (images, baseline) = Judge(), pictures
    align, gain = image_rewards.alignment(judge), image_rewards.alignment_gain(judge)
    expected = np.subtract(align(PROMPTS, REWRITES, images=images), align(PROMPTS, REWRITES, images=baseline))
    np.testing.assert_allclose(gain(PROMPTS, REWRITES, images=images, baseline_images=baseline), expected)
    assert gain(PROMPTS, PROMPTS, images=images, baseline_images=images) == [0.0] * 4


def test_faithfulness_is_a_hinge():
    judge = Judge()
    rewards = image_rewards.faithfulness(judge, margin=0.9)(PROMPTS, REWRITES)
    similarity = judge.text_text(REWRITES, PROMPTS)
    assert rewards == [0.0 if s >= 0.9 else pytest.approx(s - 0.9) for s in similarity]
    assert rewards[1] == rewards[3] == 0.0 and rewards[2] < -0.8
    with pytest.raises(UserError, match="margin"):
        image_rewards.faithfulness(judge, margin=80)


def test_length_costs_beyond_the_target():
    def count(texts):
        return [len(text.split()) for text in texts]

    texts = ["a " * n for n in (1, 6, 7, 10, 20)]
    assert image_rewards.length(count, 10, target=6)(texts, texts) == pytest.approx([0, 0, -0.1, -0.4, -1.4])
    assert image_rewards.length(count, 10)(texts, texts) == pytest.approx([0, 0, 0, 0, -1.0])
    with pytest.raises(UserError, match="target"):
        image_rewards.length(count, 10, target=11)


def test_quality_and_pixels_pass_what_their_judges_need(pictures):
    images = pictures[0]
    weight = np.array([1.0, -2.0, 0.5])
    rewards = image_rewards.quality(Judge(), lambda features: features @ weight)(PROMPTS, REWRITES, images=images)
    np.testing.assert_allclose(rewards, [picture.mean((1, 2)) @ weight for picture in images], rtol=1e-5)

    def checker(seen, requested):
        assert seen.dtype == np.float32 and seen.shape == images.shape
        return [wanted["share"] for wanted in requested]

    requested = [{"share": s} for s in (0.0, 0.5, 1.0, 0.25)]
    watch = image_rewards.pixel_accuracy(checker)
    assert watch(PROMPTS, REWRITES, images=images, requested=requested) == [0.0, 0.5, 1.0, 0.25]


def test_torch_judges_are_read_too(pictures):
    torch = pytest.importorskip("torch")

    class TorchJudge(Judge):
        def image_text(self, images, texts):
            return torch.tensor(Judge.image_text(self, images, texts), dtype=torch.bfloat16, requires_grad=True)

    rewards = image_rewards.alignment(TorchJudge())(PROMPTS, REWRITES, images=torch.tensor(pictures[0]))
    np.testing.assert_allclose(rewards, Judge().image_text(pictures[0], PROMPTS), atol=5e-3)


def test_quality_is_conditioned_on_alignment_by_default():
    names = ["alignment", "alignment_gain", "quality"]
    assert image_rewards.default_condition("quality", names) == ("alignment_gain", 0.0)
    assert image_rewards.default_condition("quality", ["alignment", "quality"]) == ("alignment", 0.25)
    assert image_rewards.default_condition("quality", ["quality"]) is None
    assert image_rewards.default_condition("alignment", names) is None
