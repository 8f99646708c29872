"""Rows that are read as training comes to them: each once an epoch, in blocks, and from the same place after a stop."""

import itertools
import json
import shutil

import datasets
import pandas
import pyarrow.parquet as pq
import pytest
import yaml
from support.text_task import ROOT, assert_same_run, make_place, rewound, train_here

from grpo_jax.config.sections import DataSection
from grpo_jax.errors import StopRun, UserError
from grpo_jax.rollout import stream
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.prompts import load_prompts, prompts_of
from grpo_jax.rollout.stream import Position, Source, StreamedRows

ROWS = 30
BATCH = 4


def rows_of(count):
    return [{"prompt": f"{number} trees", "wish": "abcdefg"[number % 7]} for number in range(count)]


def written(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    elif path.suffix == ".parquet":
        pandas.DataFrame(rows).to_parquet(path)
    else:
        pandas.DataFrame(rows).to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return path


def opened(path, **section):
    return prompts_of(DataSection(**{"prompts": str(path), "streaming": True, "shuffle_buffer": 8, **section}))


def flat(batches):
    return [*itertools.chain.from_iterable(batches)]


def drawn(streamed, iterations, seed=0):
    """The prompts of iterations, by iteration."""
    found = []
    for iteration in iterations:
        block = streamed.block_at(iteration, seed=seed, batch_size=BATCH)
        order = block.order(seed, 0, len(block.rows))
        first = (iteration - block.first) * BATCH
        found.append([block.rows[place].prompt for place in order[first : first + BATCH]])
    return found


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "rows.jsonl", rows_of(ROWS))


@pytest.mark.parametrize("buffer", [1, 8, 9, 1000])
def test_every_epoch_has_each_row_once_in_blocks_of_the_buffer(file, buffer):
    streamed = opened(file, held_out=0, shuffle_buffer=buffer).train
    batches = drawn(streamed, range(21))
    whole = [row["prompt"] for row in rows_of(ROWS)]
    epochs = [flat(batches[first : first + 7]) for first in (0, 7, 14)]  # 30 rows are 7 batches of 4
    assert all(len({*epoch}) == 28 and {*epoch} <= {*whole} for epoch in epochs)
    if buffer == 1:
        assert epochs == [whole[:28]] * 3
        return
    assert len({*map(tuple, epochs)}) == 3 and whole[:28] not in epochs
    size = -(-buffer // BATCH) * BATCH
    assert {*epochs[1][:size]} <= {*whole[:size]}
    assert drawn(opened(file, held_out=0, shuffle_buffer=buffer).train, range(21)) == batches
    assert drawn(opened(file, held_out=0, shuffle_buffer=buffer).train, range(21), seed=1) != batches


def test_what_is_held_out_never_comes(tmp_path):
    """Of the first rows, and wherever the same prompt comes again."""
    prompts = opened(written(tmp_path / "rows.jsonl", [*rows_of(ROWS), *rows_of(ROWS)]), held_out=0.2)
    kept = {row.prompt for part in prompts[1:] for row in part}
    assert len(prompts.validation) == len(prompts.test) == 12 and len(kept) == 12
    trained = flat(drawn(prompts.train, range(10)))
    assert {*trained} | kept == {row["prompt"] for row in rows_of(ROWS)} and not {*trained} & kept
    assert not {row.prompt for row in prompts.train} & kept


def test_a_file_of_its_own_is_held_out(file, tmp_path):
    apart = written(tmp_path / "apart.jsonl", rows_of(5))
    prompts = opened(file, validation=str(apart))
    assert [row.prompt for row in prompts.validation] == [f"{n} trees" for n in range(5)] and not prompts.test
    assert not {row.prompt for row in prompts.validation} & {*flat(drawn(prompts.train, range(12)))}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.tsv", "rows.parquet", "rows.txt"])
def test_rows_are_those_that_are_read_at_once(tmp_path, name):
    path = tmp_path / name
    if name == "rows.txt":
        path.write_text("".join(f"{n} trees\n\n" for n in range(ROWS)))
    else:
        written(path, [{**row, "empty": None, "number": str(n)} for n, row in enumerate(rows_of(ROWS))])
    columns = {} if name == "rows.txt" else {"answer": "number"}
    streamed = opened(path, held_out=0, columns=columns, shuffle_buffer=1).train
    assert [row for n in range(7) for row in streamed.block_at(n, seed=0, batch_size=BATCH).rows] == [*streamed][:28]
    whole = load_prompts(str(path), held_out=0, columns=columns).train
    if name == "rows.csv" or name == "rows.tsv":  # numbers of lines and of rows
        assert [row.id + 1 for row in streamed] == [row.id for row in whole]
    else:
        assert [row.id for row in streamed] == [row.id for row in whole]
    assert [(row.prompt, row.columns) for row in streamed] == [(row.prompt, row.columns) for row in whole]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_a_place_leads_to_the_same_rows(tmp_path, name):
    path = written(tmp_path / name, rows_of(ROWS))
    streamed = opened(path).train
    batches, places = [], []
    for iteration in range(12):
        places.append(json.loads(json.dumps(streamed.position(iteration)._asdict())) if iteration else None)
        batches += drawn(streamed, [iteration])
    for iteration in range(1, 12):
        again = opened(path).train
        drawn(again, [0])
        again.go_to(Position(**places[iteration]))
        assert drawn(again, range(iteration, 12)) == batches[iteration:], iteration
    assert places[4]["state"] and places[4]["count"] < 2 * ROWS


def test_several_files_come_in_another_order_each_epoch(tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number} {n}\n" for n in range(4)))
    data = datasets.load_dataset("text", data_files=str(tmp_path / "*.txt"), split="train", streaming=True)
    source = Source(data, "line", 1, tmp_path, dict)

    def begun():
        return StreamedRows(source, lambda record, number: Row(number, record["text"]), "texts", buffer=4)

    one = begun()
    batches, places = [], []
    for iteration in range(18):
        batches += drawn(one, [iteration])
        places.append(one.position(iteration + 1))
    assert [*map(len, ({text[0] for text in batch} for batch in batches))] == [1] * 18
    orders = {tuple(batch[0][0] for batch in batches[first : first + 6]) for first in (0, 6, 12)}
    assert len(orders) == 3 and all(sorted(order) == [*"012345"] for order in orders)
    assert len({row.id for row in one}) == 24
    for iteration in range(17):
        again = begun()
        again.go_to(places[iteration])
        assert drawn(again, range(iteration + 1, 18)) == batches[iteration + 1 :]


def test_what_is_bad_is_named_with_its_line_when_it_comes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path / "rows.jsonl", rows_of(3000))
    lines = path.read_text().splitlines()
    lines[4000] = "{"  # the row 2000, each with a blank line behind it
    path.write_text("\n".join(lines))
    streamed = opened(path.name, held_out=0).train
    drawn(streamed, range(500))
    with pytest.raises(StopRun, match=r"rows\.jsonl: line 4001: not JSON"):
        drawn(streamed, [500])


def test_a_table_that_cannot_be_read_is_named_with_its_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path / "rows.csv", rows_of(ROWS))
    with path.open("a") as file:
        file.write('a,"b" c\n')
    with pytest.raises(UserError, match=r"rows\.csv: row 30: what is behind it cannot be read: .*expected after"):
        opened(path.name)
    path.write_text(path.read_text().replace('"b" c', "b,c,d"))
    with pytest.raises(UserError, match=r"rows\.csv: row 31: 4 cells, and the first line names 2 columns"):
        opened(path.name)


# through the command


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = make_place(tmp_path_factory.mktemp("streamed"))
    written(place.folder / "prompts.jsonl", rows_of(40))
    return place


def config(place, name="config", **changes):
    values = yaml.safe_load(place.config.read_text())
    values["data"] |= {"streaming": True, "shuffle_buffer": 8, "held_out": 0.1}
    values["training"] |= {"max_steps": 12, "save_every": 1, "keep_checkpoints": 100}
    for section, fields in changes.items():
        values.setdefault(section, {}).update(fields)
    file = place.folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.fixture(scope="module")
def run(place):
    assert train_here(config(place), place.folder / "run") == 0
    return place.folder / "run"


def prompts_in(run, step):
    return pq.read_table(run / "completions" / f"step_{step:06d}.parquet")["prompt"].to_pylist()


@pytest.mark.parametrize("step", [1, 7, 10])  # within a block, at the end of one, in the next epoch
def test_a_run_goes_on_as_if_it_had_never_stopped(run, place, tmp_path, step):
    again = rewound(run, tmp_path / "again", step)
    assert train_here(place.folder / "config.yaml", again, "--resume") == 0
    assert_same_run(again, run)
    assert all(prompts_in(again, n) == prompts_in(run, n) for n in range(step + 1, 13))


def test_a_run_that_samples_ahead_goes_on_too(place, tmp_path):
    file = config(place, "ahead", training={"lag": 1, "max_steps": 9}, algorithm={"dead_groups": "resample"})
    assert train_here(file, tmp_path / "run") == 0
    again = rewound(tmp_path / "run", tmp_path / "again", 5)
    assert train_here(file, again, "--resume") == 0
    assert_same_run(again, tmp_path / "run")


def test_a_malformed_line_ends_a_run_that_goes_on_when_it_is_mended(run, place, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stream, "HEAD", 10)
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "prompts.jsonl"
    shutil.copy(place.folder / "prompts.jsonl", data)
    file = config(place, "mended", data={"prompts": data.name}, training={"max_steps": 9})
    assert train_here(file, tmp_path / "whole") == 0
    capsys.readouterr()
    good = data.read_text()
    data.write_text(good.replace('"30 trees"', '"30 trees'))
    assert train_here(file, tmp_path / "run") == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1 and "prompts.jsonl: line 61: not JSON" in errors[0]
    assert "Saved after iteration 6; go on with --resume" in errors[0]
    data.write_text(good)
    assert train_here(file, tmp_path / "run", "--resume") == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_what_training_does_not_come_to_is_not_read(place, tmp_path):
    """A file of 10^6 lines, all but the first hundredth of which are none."""
    data = tmp_path / "prompts.jsonl"
    with data.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows_of(10_000))
        file.writelines(itertools.repeat("{not a row\n", 990_000))
    values = config(place, "long", data={"prompts": str(data), "shuffle_buffer": 100}, training={"max_steps": 3})
    assert train_here(values, tmp_path / "run") == 0
    assert {*prompts_in(tmp_path / "run", 3)} <= {row["prompt"] for row in rows_of(200)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training.max_steps": 0}, "training.max_steps: expected above 0 with data.streaming"),
        ({"data.curriculum": "wish"}, "data.curriculum: expected nothing with data.streaming"),
        ({"data.informative_half_life": 3}, "data.informative_half_life: expected nothing with data.streaming"),
        ({"data.prompts": "missing.jsonl"}, "missing.jsonl does not exist"),
        ({"data.prompts": "builtin"}, "data.prompts: expected a .jsonl, .csv, .tsv, .txt or .parquet file, or hub:"),
        ({"data.shuffle_buffer": 0}, "data.shuffle_buffer: expected"),
        ({"data.columns.wish": "hope"}, "data.columns.wish: no such column, 'hope'"),
        ({"training.prompts_per_batch": 64}, "a batch takes 64 different prompts and there are 3"),
        ({"task": f"{ROOT}/examples/own_task/task.py:Countdown"}, "data.streaming: expected false with this task"),
    ],
)
def test_what_a_stream_cannot_do_is_one_line(place, tmp_path, capsys, changes, message):
    config(place)
    arguments = [f"--{name}={value}" for name, value in changes.items()]
    assert train_here(place.folder / "config.yaml", tmp_path / "run", *arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1], error


def test_rows_with_a_split_are_refused(tmp_path):
    path = written(tmp_path / "rows.jsonl", [{**row, "split": "train"} for row in rows_of(ROWS)])
    with pytest.raises(UserError, match=r'line 1: it has a "split"; a stream is trained on'):
        opened(path)
