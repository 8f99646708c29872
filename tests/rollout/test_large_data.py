"""A large data set stays on disk: rows are made on access, and equal those of a list."""

import gc
import hashlib
import json
import pickle
import random

import pytest
from rollout.test_files import written

from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import SPLITS, Row
from grpo_jax.rollout.prompts import load_prompts
from grpo_jax.runs.directory import RunDirectory
from grpo_jax.runs.python_input import from_python, keep_prompts, kept_prompts

COLUMNS = {"prompt": "question"}


def living():
    gc.collect(1)  # of what is new: all that a worker holds takes a second
    return sum(type(one) is Row for one in gc.get_objects())


def test_rows_are_made_when_they_are_drawn(tmp_path):
    before = living()
    kinds = [load_prompts(written(tmp_path, kind), held_out=1, columns=COLUMNS) for kind in ("jsonl", "saved")]
    assert living() == before
    for parts in kinds:
        drawn = parts.train[3]
        assert drawn is not parts.train[3] and drawn == parts.train[3] and parts.train[1:3] == (*[*parts.train][1:3],)
        assert [len(part) for part in parts] == [6, 1, 1]
        assert {row.columns["solution"] for part in parts for row in part} == {f"00{i}" for i in range(8)}


def test_a_data_set_given_in_python_is_drawn_from_its_table(tmp_path):
    import datasets

    table = datasets.Dataset.from_dict({"prompt": [f"{i} trees" for i in range(40)], "answer": [*range(40)]})
    before, directory = living(), RunDirectory(tmp_path)
    source = from_python(make_config(task="text", data={"held_out": 0.1}), table, None)
    keep_prompts(source, directory, print)
    kept = kept_prompts(directory)
    assert living() == before and [len(part) for part in kept] == [32, 4, 4]
    assert [*map(list, kept)] == [*map(list, source.prompts)]
    resumed = source._replace(config=make_config(task="text", resume=True, run_dir=str(tmp_path)))
    keep_prompts(resumed, directory, print)
    with pytest.raises(UserError, match="the prompts are not those that"):
        keep_prompts(resumed._replace(prompts=kept._replace(test=())), directory, print)


@pytest.mark.parametrize("held_out", [0, 7, 0.1])
def test_splits_equal_a_slow_loop_over_lists(held_out):
    rng = random.Random(3)
    keys = [f"prompt {rng.randrange(90)}" for _ in range(300)]
    count = round(held_out * len(set(keys))) if isinstance(held_out, float) else held_out
    parts = load_prompts([{"prompt": key} for key in keys], held_out=held_out)
    found = {row.id: split for split, part in zip(SPLITS, parts, strict=True) for row in part}
    ranked = sorted(set(keys), key=lambda text: hashlib.sha256(text.encode()).digest())
    expected = [SPLITS[2] if key in ranked[:count] else SPLITS[key in ranked[count : 2 * count]] for key in keys]
    assert [found[place] for place in range(300)] == expected
    assert all([row.id for row in part] == sorted(row.id for row in part) for part in parts)
    rng.shuffle(keys)  # the choice depends on no order
    again = load_prompts([{"prompt": key} for key in keys], held_out=held_out)
    assert [{row.prompt for row in part} for part in again] == [{row.prompt for row in part} for part in parts]


def test_lines_of_json_keep_their_types(tmp_path):
    values = [1, 2.5, "2024-01-01", True, None, [], [1, "a"], {"b": 1}, {"a": {"c": None}}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": "p", "value": v}) + "\n" for v in values))
    rows = load_prompts(tmp_path / "p.jsonl", held_out=0).train
    assert repr([row.columns["value"] for row in rows]) == repr(values)
    assert pickle.loads(pickle.dumps([*rows])) == [*rows]


def test_many_mistakes_are_counted_and_the_first_named(tmp_path):
    parts = [{"prompt": f"p{i % 50}", "split": "train" if i < 50 else "test"} for i in range(100)]
    bad = [{"prompt": ""}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*parts, *bad, {"prompt": "y"}]))
    with pytest.raises(UserError) as error:
        load_prompts(tmp_path / "p.jsonl")
    message = str(error.value)
    assert '52 bad lines: line 101: "prompt" is empty; line 51: this test prompt is also a train prompt (l' in message
    assert message.endswith("also a train prompt (line 1); and 50 more")
