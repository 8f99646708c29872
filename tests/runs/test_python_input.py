"""Prompts and rewards passed to `run` in Python, and resuming from the run directory alone."""

import importlib
import json
import re
import shutil

import numpy as np
import pytest
import yaml
from support.text_task import SHORT, completions, rewound, rows, train_here

from grpo_jax import PromptSet, evaluate, make_prompt_set
from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.runs.policy import run_config
from grpo_jax.runs.python_input import from_python
from grpo_jax.train import main, run

OWN = """
def letters(prompts, completions, wish, number, by_number, **columns):
    wishes = [letters[n] for letters, n in zip(by_number, number)]
    assert wishes == [(w, {w}) for w in wish]
    return [sum(c.isalpha() for c in text) / 8 + text.count(w) for text, (w, _) in zip(completions, wishes)]

def brief(completions, *, size=10, **columns):
    return [-len(text) / size for text in completions]
"""
PARTS = {"train": "abcdefgh", "validation": "ij", "test": "kl"}
RECORDS = [{"prompt": f"{c} tree", "wish": c, "split": split} for split, letters in PARTS.items() for c in letters]
# Values that JSON does not give back.
RECORDS = [
    one | {"by_number": {7: (one["wish"], {one["wish"]})}, "number": np.int64(7), "x": np.nan} for one in RECORDS
]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A module of rewards."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_given_rewards.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("own_given_rewards")


@pytest.fixture(scope="module")
def config(place):
    """The tiny task for two steps, without prompts and rewards of its own."""

    def make(folder, **changes):
        values = yaml.safe_load(place.config.read_text()) | {"run_dir": str(folder), "rewards": [], "algorithm": {}}
        values |= {"data": {"max_prompt_tokens": 64}, "optimizer": {"learning_rate": 0.01, "warmup_steps": 3}}
        values["training"] |= {"max_steps": 2, "save_every": 1, "inner_epochs": 1, "minibatches": 1}
        return make_config(values | changes)

    return make


@pytest.fixture(scope="module")
def finished(own, config, tmp_path_factory):
    """A run of both rewards, of which the config weighs one and sets its option; its folder and its summary."""
    folder = tmp_path_factory.mktemp("given") / "run"
    weighed = [{"name": "brief", "weight": 0.25, "options": {"size": 40.0}}]
    return folder, run(config(folder, rewards=weighed), prompts=RECORDS, rewards=[own.letters, own.brief])


def test_the_split_of_records_is_that_of_a_file(finished):
    folder, summary = finished
    trained = {prompt for step in (1, 2) for prompt in completions(folder, step)["prompt"]}
    assert trained == {f"{c} tree" for c in PARTS["train"]}
    assert summary["prompts"] == 2
    for records in ([{"prompt": "a", "split": "dev"}], [{"prompt": "a", "split": "train"}, {"prompt": "b"}]):
        with pytest.raises(UserError, match='"split"'):
            run(make_config(task="text", run_dir=str(folder.parent / "x")), prompts=records)
    assert not (folder.parent / "x").exists()


def test_weight_and_options_of_the_config_apply_to_functions(finished):
    folder, summary = finished
    written = completions(folder, 1)
    np.testing.assert_allclose(written["reward/brief"], [-len(text) / 40 for text in written["completion"]], rtol=1e-6)
    row = rows(folder)[0]
    total = row["reward/letters/mean"] + 0.25 * row["reward/brief/mean"]
    assert row["reward/total/mean"] == pytest.approx(total, rel=1e-6)
    after = {name: values["after"] for name, values in summary["evaluation"].items()}
    assert summary["reward"] == pytest.approx(after["letters"] + 0.25 * after["brief"])


def test_a_run_from_python_is_evaluated_on_its_own_prompts(finished, own, tmp_path, capsys, monkeypatch):
    folder, summary = finished
    moved = shutil.copytree(folder, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)  # rewards are found from any folder
    assert [one.name for one in run_config(folder).rewards] == [f"{own.__file__}:{f}" for f in ("letters", "brief")]
    assert evaluate.main(["--run", str(moved), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["prompts"] == 2
    assert measured["greedy"] == {name: values["after"] for name, values in summary["evaluation"].items()}


def test_rows_that_change_during_a_run_change_nothing(config, tmp_path):
    """Those of prompts.jsonl are trained on, or a resumed run would be another."""
    records = [{"prompt": f"{letter} tree", "facts": {"visits": [0]}} for letter in "abcdefgh"]

    def visits(completions, facts):
        return [float(one["visits"][0]) for one in facts]

    def visit(event):
        for record in records:
            record["facts"]["visits"][0] += 1

    summary = run(config(tmp_path / "run"), prompts=records, rewards=[visits], on_iteration=visit)
    assert records[0]["facts"] == {"visits": [2]} and summary["reward"] == 0


def test_a_new_best_checkpoint_is_printed(finished):
    assert "new best checkpoint after iteration " in (finished[0] / "train.log").read_text()


def test_a_mistake_is_raised_from_the_top(config, tmp_path):
    with pytest.raises(UserError, match="no_such_folder") as raised:
        run(config(tmp_path / "run", policy={"path": "./no_such_folder"}), prompts=RECORDS, rewards=[brief])
    assert len(raised.traceback) == 2 and raised.value.__cause__ is None and raised.value.__suppress_context__
    with pytest.raises(UserError) as raised:
        make_config(task="text", sampling={"top_p": 2})
    assert len(raised.traceback) == 2 and raised.value.__suppress_context__
    with pytest.raises(UserError, match=r"config: expected that of make_config.*, got {'task': 'text'}"):
        run({"task": "text"})


def test_advice_from_python_has_no_options_of_the_command(finished, config, tmp_path):
    with pytest.raises(UserError, match=r"is not empty; continue it with resume=True or choose another run_dir"):
        run(config(finished[0]), prompts=RECORDS, rewards=[brief])
    with pytest.raises(UserError, match=r"fix the reward and start again, or choose on_judge_error missing$"):
        run(config(tmp_path / "run"), prompts=RECORDS, rewards={"mine": failing([])})


def test_a_run_from_python_is_resumed_by_the_command(finished, tmp_path):
    folder, summary = finished
    again = rewound(folder, tmp_path / "again", 1)
    assert main(["--resume", "--run_dir", str(again)]) == 0
    assert rows(again) == rows(folder)
    assert json.loads((again / "summary.json").read_text())["evaluation"] == summary["evaluation"]


def test_resuming_with_other_prompts_is_refused(finished, own, config, tmp_path):
    folder, _ = finished
    again = config(folder).replace(resume=True)
    with pytest.raises(UserError, match="resume=True: the prompts are not those that"):
        run(again, prompts=[*RECORDS[1:], RECORDS[0]], rewards=[own.letters, own.brief])


def brief(completions, size=10, **columns):
    return [-len(text) / size for text in completions]


def test_rows_of_equal_ids_are_refused(config, tmp_path):
    """An episode of tools would get the row of another split."""
    train, test = (make_prompt_set([{"prompt": f"{c} tree"} for c in letters]).train for letters in ("abcdef", "gh"))
    message = 'prompts: expected rows of different ids, as of make_prompt_set, got "2 with another\'s id"'
    with pytest.raises(UserError, match=message):
        run(config(tmp_path / "run"), prompts=PromptSet(train, (), test), rewards=[brief])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": "a tree"}, "prompts: expected a list of texts or of records .*, got a str"),
        ({"prompts": {"prompt": ["a", "b"]}}, "got a dict"),
        ({"prompts": 7}, "got a int"),
        ({"prompts": ["a", ["b"]]}, "got a list as row 1"),
        ({"prompts": []}, "prompts: expected at least one"),
        ({"rewards": [brief, "length"]}, "rewards: expected functions, got .length."),
        ({"rewards": [0.5, 1.0]}, "expected functions, got 0.5, 1.0 .config.rewards takes import paths and weights"),
        ({"rewards": []}, "expected at least one function"),
        ({"rewards": [brief, brief]}, "expected at least one function, each of another name"),
        ({"rewards": [len]}, "config.rewards names brief, but the functions given are len"),
        ({"rewards": brief}, r"rewards.brief.options: expected arguments of the reward \(size\), got 'sise'"),
    ],
)
def test_bad_input_is_one_clear_line(config, tmp_path, given, message):
    with pytest.raises(UserError, match="run_dir: expected a folder"):
        run(config(tmp_path).replace(run_dir=None))
    config = config(tmp_path / "run", rewards=[{"name": "brief", "options": {"sise": 40}}])
    with pytest.raises(UserError, match=message):
        run(config, **{"prompts": [f"{c} tree" for c in "abcdefghijkl"], **given})
    assert not (tmp_path / "run").exists()


def failing(seen):
    """A reward that remembers what it was asked about, and ends the run there."""

    def remember(prompts, completions, wish, **columns):
        seen.extend(zip(prompts, wish, strict=True))
        raise RuntimeError("enough")

    return remember


def test_tables_are_read_by_their_rows(config, tmp_path):
    given = pytest.importorskip("pandas").DataFrame(RECORDS)
    given["wish"] = [None if wish == "k" else 7 for wish in given["wish"]]  # pandas makes it NaN
    seen = []
    with pytest.raises(UserError, match="Nothing was trained yet; fix the reward and start again"):
        run(config(tmp_path / "run"), prompts=given, rewards={"mine": failing(seen)})
    assert seen == [("k tree", None), ("l tree", 7)]
    assert not (tmp_path / "run").exists()


def test_columns_that_cannot_be_stored_give_a_warning(config, tmp_path, capsys):
    records = [record | {"wish": re.compile(record["wish"])} for record in RECORDS]

    def wished(completions, wish):
        return [float(len(w.findall(text))) for text, w in zip(completions, wish, strict=True)]

    folder = tmp_path / "run"
    short = config(folder, evaluation={"every": 0, "samples": 0})
    short = short.replace(training=short.training.replace(max_steps=1))
    run(short, prompts=records, rewards=[wished])
    assert "the column wish has no JSON and no Python literal (re.compile('a')): the prompts" in capsys.readouterr().out
    assert evaluate.main(["--run", str(folder)]) == 2
    assert "prompts.jsonl does not keep them: call run(config, prompts=...) again" in capsys.readouterr().err
    with pytest.raises(UserError, match="reward wished: run\\(\\) was given this function in Python"):
        run(run_config(folder).replace(resume=True), prompts=records)


def test_without_held_out_prompts_all_are_trained_on(place, tmp_path, capsys, recwarn):
    folder = tmp_path / "run"
    assert train_here(place.config, folder, "--data.held_out=0", "--training.max_steps=4", *SHORT) == 0
    out = capsys.readouterr().out
    assert "16 train, 0 validation, 0 test" in out
    assert "no prompts are held out: nothing is measured before and after training" in out
    trained = {prompt for step in range(1, 5) for prompt in completions(folder, step)["prompt"]}
    assert trained == {f"{c} tree" for c in "abcdefghijklmnop"}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["evaluation"] == {} and summary["prompts"] == 0
    assert summary["reward"] is None and summary["improvement"] is None
    assert (folder / "policy" / "config.json").is_file() and (folder / "report.html").is_file()
    assert evaluate.main(["--run", str(folder)]) == 2
    assert "no prompts were held out (data.held_out), so there is nothing to measure" in capsys.readouterr().err
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


def test_rows_of_datasets_are_those_that_iteration_gives():
    data = importlib.import_module("datasets").Dataset.from_list([{"prompt": letter} for letter in "abc"])
    section = make_config(task="text", data={"held_out": 0})
    assert [row.prompt for row in from_python(section, data.to_iterable_dataset(), None).prompts.train] == [*"abc"]
    with pytest.raises(UserError, match=r"prompts: set_transform is not applied here: apply the function by map"):
        from_python(section, data.with_transform(lambda rows: {"prompt": [f"say {p}" for p in rows["prompt"]]}), None)


def test_a_table_names_each_column_once():
    table = pytest.importorskip("pandas").DataFrame([["a", "b"]], columns=["prompt", "prompt"])
    with pytest.raises(UserError, match="prompts: expected a table that names each column once"):
        from_python(make_config(task="text"), table, None)


def test_lists_of_a_table_are_lists():
    message = {"role": "user", "content": "a"}
    rows = [[np.array([message], object), np.array(["b", "c"], object), np.float32(2), np.arange(2)]]
    table = pytest.importorskip("pandas").DataFrame(rows, columns=["prompt", "answer", "number", "vector"])
    (row,) = from_python(make_config(task="text", data={"held_out": 0}), table, None).prompts.train
    assert row.prompt == "a" and row.columns["answer"] == ["b", "c"] and row.columns["number"] == 2
    np.testing.assert_array_equal(row.columns["vector"], [0, 1])
