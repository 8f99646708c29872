"""Rows of a data set: all errors in one message, a constant split, a constant order."""

from pathlib import Path

import numpy as np
import pandas
import pytest
from support.marked_tokenizers import TOKENIZERS

from grpo_jax.config.sections import DataSection
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import Row, batch_at, batches_per_epoch, epoch_order, noise_seed
from grpo_jax.rollout.encoding import as_is, completion_statistics, continued, make_decode
from grpo_jax.rollout.prompts import BUILTIN, load_prompts, make_prompt_set


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        (
            "p.jsonl",
            '\ufeff{"prompt": " été  ", "answer": 7}\n\n{"prompt": "b", "tags": ["x"]}\n',
            (Row(1, "été", {"answer": 7}), Row(3, "b", {"tags": ["x"]})),
        ),
        ("p.txt", "a red fox\r\n  \r\n# not a comment\r\n", (Row(1, "a red fox"), Row(3, "# not a comment"))),
        ("p.csv", "prompt,answer,wish\na,,x\n\nb,7\n", (Row(2, "a", {"wish": "x"}), Row(4, "b", {"answer": "7"}))),
        ("index.csv", ",prompt\n0,a\n", (Row(2, "a", {"Unnamed: 0": "0"}),)),  # as pandas writes it
    ],
)
def test_rows_carry_line_numbers_and_columns(tmp_path, name, content, rows):
    (tmp_path / name).write_bytes(content.encode())
    assert tuple(load_prompts(tmp_path / name, held_out=0).train) == rows


def test_split_column_decides():
    records = [{"prompt": f"p{i}", "split": ["train", "validation", "test"][i % 3]} for i in range(7)]
    parts = load_prompts(records, held_out=0.4)
    assert [[row.prompt for row in part] for part in parts] == [["p0", "p3", "p6"], ["p1", "p4"], ["p2", "p5"]]
    assert all("split" not in row.columns for part in parts for row in part)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "x"', "not JSON"),
        (b'["x"]', "got list"),
        (b'{"text": "x"}', "no \"prompt\" (it has 'text')"),
        (b'{"prompt": 3}', "must be text or a list of messages, got int"),
        (b'{"prompt": "  "}', "is empty"),
        (b'{"prompt": "x", "split": "dev"}', "got 'dev'"),
        (b'{"prompt": "x", "baseline_images": 1}', "column 'baseline_images'"),
        (b'{"prompt": "no split"}', 'no "split"'),
        (b'{"prompt": "fine", "split": "test"}', "also a train prompt (line 1)"),
        (b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", "value has 5000 digits"),
        (b'{"prompt": "x", "n": NaN}', "'NaN' is no finite number"),
        (b'{"prompt": "\\ud800"}', "half a character"),
        (b'{"prompt": "a\\u0000b"}', "holds a NUL character"),
        (b'{"prompt": "x", "prompt": "y"}', "'prompt' occurs twice in one object"),
        (b'{"prompt": "x", "t": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'\xef\xbb\xbf{"prompt": "x"}', "not JSON (Unexpected UTF-8 BOM"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, reason):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "fine", "split": "train"}\n' + line)
    with pytest.raises(UserError) as error:
        load_prompts(path)
    message = str(error.value)
    assert message.startswith(f"{path}: 1 bad line: line 2: ") and reason in message
    assert "\n" not in message and len(message) < 300


EMPTY_TABLE = pandas.DataFrame({"prompt": []}).to_parquet()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "does not exist"),
        ("latin.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2: not UTF-8 text; save it as UTF-8"),
        ("latin.csv", b"prompt\na\n\xff\n", "latin.csv: line 3: not UTF-8 text"),
        ("nul.txt", "fine\nnot\0fine\n", r"line 2: 'not.x00fine' holds a NUL character"),
        ("empty.jsonl", "", "expected at least one prompt"),
        ("head.csv", "prompt,answer\n", "head.csv: expected at least one prompt"),
        ("none.parquet", EMPTY_TABLE, "none.parquet: expected at least one prompt"),
        ("p.xlsx", "prompt\na", ".jsonl, .csv, .tsv, .txt or .parquet file"),
        ("twice.csv", "prompt,prompt\na,b", "its first line names a column twice"),
        ("cells.csv", "prompt,answer\na,b,c", "cells.csv cannot be loaded: Length of header or names does not match"),
        ("nul.csv", "prompt\na\0b", "row 2: 'a.x00b' holds a NUL character"),
        (
            "q.jsonl",
            '{"id": 1, "question": "a"}',
            "has 'id, question', and no \"prompt\": .* --data.columns.prompt question",
        ),
        ("q.csv", "a,b\n1,2", "has 'a, b', and no \"prompt\": say which one asks, as in --data.columns.prompt a"),
        ("long.csv", f"{'9' * 5000},b\n1,2", r"--data.columns.prompt '9{78}…$"),
        ("two.txt", "a\nb\n", "too few"),
        ("test.jsonl", '{"prompt": "a", "split": "test"}', 'no line with "split": "train"'),
    ],
)
def test_files_without_prompts_to_train_on(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)  # a message shortens a long path
    if content is not None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as error:
        load_prompts(Path(name))
    assert len(str(error.value)) < 400
    with pytest.raises(UserError, match="is neither a `Dataset` directory nor a `DatasetDict` directory"):
        load_prompts(tmp_path)


def test_builtin_tiers():
    everything = load_prompts("builtin", held_out=0).train
    assert len({row.prompt for row in everything}) == len(everything) == 120
    for name in BUILTIN[1:]:
        rows, tier = load_prompts(name, held_out=0).train, name.removeprefix("builtin:")
        assert len(rows) == 40
        assert all(everything[row.id] == row and row.columns == {"tier": tier} for row in rows)
    assert [len(part) for part in load_prompts("builtin", held_out=0.1)] == [96, 12, 12]
    with pytest.raises(UserError, match=r"from builtin\[:plain\|attributes\|crowded\]"):
        load_prompts("builtin:hard")


def test_rows_in_memory_get_ids_that_count_through():
    rows = [{"prompt": "a", "requested": {"colour": "red"}}, {"prompt": "b"}]
    parts = make_prompt_set(rows, [{"prompt": "c"}], [{"prompt": "d"}])
    assert [row.id for part in parts for row in part] == [0, 1, 2, 3]
    assert parts.train[0].columns == {"requested": {"colour": "red"}}
    assert "prompt" in rows[0]  # the caller's rows are left as they were
    with pytest.raises(UserError, match=r"train: 1 bad line: row 1: .*empty"):
        make_prompt_set([{"prompt": "a"}, {"prompt": ""}])
    with pytest.raises(UserError, match="train: expected at least one prompt"):
        make_prompt_set([])


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


def test_appended_words_are_told_apart_from_the_prompt():
    """A word tokenizer writes no space before a text's first word: 'a fox' + 'in snow' was once 'a foxin snow'."""
    words, bytes_ = TOKENIZERS["words"](), TOKENIZERS["qwen2"]()
    ids = words("in words", add_special_tokens=False)["input_ids"]
    append = DataSection(form="append")
    assert make_decode(words, append, read=continued)(ids, "a fox") == (" in words", ("a fox in words", True))
    whole = make_decode(words, DataSection(), read=as_is)
    assert whole(np.array(ids), "a fox") == ("in words", ("in words", True))
    ids = bytes_("es, été<|im_end|>")["input_ids"]
    assert make_decode(bytes_, append, read=continued)(ids, "a fox") == ("es, été", ("a foxes, été", True))


def test_statistics_by_hand():
    texts = [["A red fox", "a fox", "a fox"], ["red dog's bed", "a dog", "red sky"]]
    valid = [[True, False, False], [True, True, True]]
    result = completion_statistics(["a fox", "a dog"], texts, valid)
    by_hand = {"words": 14 / 6, "growth": 2 / 6, "duplicates": 1 / 6, "unchanged": 3 / 6, "invalid": 2 / 6}
    assert result == pytest.approx(by_hand)
