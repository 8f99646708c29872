"""A tiny recommendation run from config to table, and its refusals: other data, a retriever that dies."""

import json
import os
import re
import shutil
import signal

import jax
import numpy as np
import pytest
from support.text_task import final_state, rows

from grpo_jax.config.run import make_config
from grpo_jax.errors import StopRun, UserError
from grpo_jax.runs.checkpoint import read_manifest, write_manifest
from grpo_jax.tasks.recommendation.dataset import load_dataset
from grpo_jax.train import main, run

OWN = '''
def brand(completions, target_title, rank, worth=1.0):
    """What it is worth that the brand is right."""
    assert all(value >= 1 for value in rank)
    return [worth * (text.split()[:1] == title.split()[:1]) for text, title in zip(completions, target_title)]
'''
TASK = {
    "kind": "recommendation",
    "separator": " | ",
    "dummy_users": 40,
    "dummy_items": 280,
    "prior": {"history": 0.5, "decay": 0.6},
}


def config_of(folder, name, **changes):
    own = folder / "own.py"
    own.write_text(OWN)
    values = {
        "task": TASK,
        "run_dir": str(folder / name),
        "report_to": [],
        "policy": {"path": "new", "remat": "none", "new": {"width": 16, "layers": 1, "heads": 2, "window": 64}},
        "sft": {"steps": 3, "batch": 8},
        "data": {"max_prompt_tokens": 32},
        "sampling": {"group_size": 4, "max_new_tokens": 5},
        "optimizer": {"learning_rate": 0.01},
        "training": {"prompts_per_batch": 4, "max_steps": 2, "save_every": 1},
        "rewards": [
            {"name": "ndcg"},
            {"name": "soft", "weight": 0.5, "condition_on": "ndcg", "threshold": 0.1},
            {"name": f"{own}:brand", "weight": 0.5, "options": {"worth": 3.0}},
        ],
        "evaluation": {"prompts": 12, "validation_prompts": 8, "every": 0},
    }
    return make_config(values | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of all files."""
    return tmp_path_factory.mktemp("recommendation")


@pytest.fixture(scope="module")
def summary(folder):
    return run(config_of(folder, "whole"))


def test_the_table_stands_in_console_report_and_summary(folder, summary):
    methods = ["popularity", "item-kNN, decay 0.7", "Markov-1 + popularity"]
    methods += ["last title", "prior alone", "last title + prior", "oracle: own title"]
    methods += ["policy, untrained"]
    methods += ["policy, before", "policy, before, sampled", "policy, after", "policy, after, sampled"]
    saved = json.loads((folder / "whole" / "summary.json").read_text())
    table = {row["method"]: row for row in saved["table"]}
    assert list(table) == methods
    for measure in ("HR@5", "HR@10", "NDCG@5", "NDCG@10", "MRR"):
        means = saved["evaluation"][measure.lower()]
        named = {"oracle": "oracle: own title"}
        named |= {
            kind.replace(", ", "_"): f"policy, {kind}"
            for kind in ("before", "after", "before, sampled", "after, sampled")
        }
        for kind, method in named.items():
            assert means[kind] == pytest.approx(table[method][measure]["mean"], rel=1e-5)
        assert all(row[measure]["low"] <= row[measure]["mean"] <= row[measure]["high"] for row in table.values())
    assert all(row["users"] == 12 for row in table.values())
    assert table["oracle: own title"]["NDCG@10"]["mean"] > 0.9
    report, log = (folder / "whole" / "report.html").read_text(), (folder / "whole" / "train.log").read_text()
    for method in methods:
        assert method in report and method in log
    assert "Ranking, 12 users" in report
    pairs = [f"policy, after{kind} − policy, before{kind}" for kind in ("", ", sampled")]
    assert [row["method"] for row in saved["differences"]] == [*pairs, "last title + prior − prior alone"]
    for row, kind in zip(saved["differences"], ("", ", sampled"), strict=False):
        after, before = (table[f"policy, {when}{kind}"]["NDCG@100"]["mean"] for when in ("after", "before"))
        assert row["NDCG@100"]["mean"] == pytest.approx(after - before, abs=1e-12)
        assert row["method"] in report and row["method"] in log
    assert "retrieval  tfidf, in this process" in log and "SFT 3/3" in log and "epoch" in log


def test_a_new_policy_learns_and_is_exported(folder, summary):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    place = folder / "whole"
    start, end = (AutoModelForCausalLM.from_pretrained(place / name) for name in ("policy_start", "policy"))
    assert end.config.model_type == "llama" and end.config.max_position_embeddings == 64
    assert all(not torch.equal(a, b) for a, b in zip(start.parameters(), end.parameters(), strict=True))


def test_rewards_and_ranks_are_those_of_a_plain_loop(folder, summary):
    """Every completion of the first step ranked again: scikit-learn's vectors, a sort, no tie spared.

    The query is the text's direction, and half as much the history's, decayed and each word times its idf.
    """
    import pyarrow.parquet
    from sklearn.feature_extraction.text import TfidfVectorizer

    dataset = load_dataset(config_of(folder, "whole").task)
    titles = list(dataset.catalogue.titles)
    vectorizer = TfidfVectorizer(sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    vectors = vectorizer.fit_transform(titles).toarray()
    asked = {row.prompt: row.columns for row in dataset.prompts.train}
    written = pyarrow.parquet.read_table(folder / "whole" / "completions" / "step_000001.parquet").to_pylist()
    assert len(written) == 16
    for line in written:
        columns = asked[line["prompt"]]
        ages = enumerate(reversed(columns["history"]))
        taken = vectorizer.idf_ * sum(0.6**age * vectors[row] for age, row in ages)
        text = vectorizer.transform([line["completion"]]).toarray()[0]
        scores = vectors @ (text + 0.5 * taken / np.linalg.norm(taken))
        target = columns["target_row"]
        others = [row for row in range(len(titles)) if row != target and row not in columns["history"]]
        rank = 1 + sum(scores[row] >= scores[target] - 1e-6 for row in others)
        assert line["eval_rewards/rank"] == rank
        assert line["reward/ndcg"] == pytest.approx(1 / np.log2(1 + rank), rel=1e-6)
        assert line["eval_rewards/hr@10"] == (rank <= 10)
        assert line["reward/brand"] == 3.0 * (line["completion"].split()[:1] == columns["target_title"].split()[:1])
    row = rows(folder / "whole")[0]
    assert {"missing/ndcg", *(f"zero_variance_groups/{name}" for name in ("ndcg", "soft", "brand"))} <= row.keys()


def test_the_evaluate_command_measures_a_run_that_was_moved(folder, summary, capsys):
    from grpo_jax.evaluate import main

    shutil.copytree(folder / "whole", folder / "moved")
    assert main(["--run", str(folder / "moved"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for row, expected in zip(report["table"][-2:], summary["table"][-2:], strict=True):
        assert row == expected | {"method": expected["method"].replace("after", "final")}


def test_another_catalogue_is_refused_by_name(folder, summary):
    """By the field that names it; where files hold other titles under the same name, by what they are known by."""
    with pytest.raises(UserError, match=r"made with other values \(task.dummy_items: 280 → 560\)"):
        run(config_of(folder, "whole", resume=True, task={**TASK, "dummy_items": 560}))
    shutil.copytree(folder / "whole", folder / "other")
    latest = folder / "other" / "checkpoints" / "step_2"
    content = read_manifest(latest)
    task = content["meta"]["progress"]["identity"]["task"]
    titles, task["catalogue"] = task["catalogue"], "281 titles"
    write_manifest(latest, content)
    with pytest.raises(UserError, match=rf"other data or models \(catalogue: 281 titles → {re.escape(titles)}\)"):
        run(config_of(folder, "other", resume=True))


def test_a_dead_retriever_saves_and_stops_the_run(folder, monkeypatch):
    from bridges import retrieval
    from bridges.retrieval.ranking import LocalBackend

    count, calls = LocalBackend.count, []

    def dying(backend, parts):
        calls.append(sum(len(part.targets) for part in parts))
        if calls.count(16) == 2:  # the second batch of 4 × 4; evaluations are of 12
            raise retrieval.RetrievalError("the actor died")
        return count(backend, parts)

    monkeypatch.setattr(LocalBackend, "count", dying)
    monkeypatch.setattr(retrieval, "PAUSES", ())
    with pytest.raises(
        StopRun, match=r"RetrievalError: the actor died.*Saved after iteration 1; continue with resume=True and run_dir"
    ):
        run(config_of(folder, "broken"))
    assert not (folder / "broken" / "summary.json").exists()


def test_a_run_that_was_stopped_within_sft_begins_it_again(folder, summary, monkeypatch, capsys):
    from grpo_jax.runs import sft

    place = folder / "interrupted"
    supervised_batch, calls = sft.supervised_batch, []

    def interrupted(*arguments):
        calls.append(len(calls) + 1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return supervised_batch(*arguments)

    monkeypatch.setattr(sft, "supervised_batch", interrupted)
    assert run(config_of(folder, "interrupted"))["stopped"]
    stopped = f"stopped before the first iteration: continue with --resume --run_dir {place}"
    assert stopped in capsys.readouterr().out
    assert rows(place) == []
    assert main(["--resume", "--run_dir", str(place)]) == 0
    assert calls == [1, 2, 3, 4, 5]
    assert rows(place) == rows(folder / "whole")
    assert json.loads((place / "summary.json").read_text())["table"] == summary["table"]
    ours, theirs = (final_state(path)[0]["variables"] for path in (place, folder / "whole"))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
