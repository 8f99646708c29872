"""Several completions per held-out prompt: mean@k, best@k, pass@k and their intervals, as formulas and in a run.

The sampling settings of its config hold in training, in evaluation, and in `predict`.
"""

import itertools
import json
import math

import numpy as np
import pyarrow.parquet
import pytest
import yaml
from support.text_task import train_values

from grpo_jax import evaluate, load_rewriter
from grpo_jax.core.pass_at_k import mean_interval, pass_at_k
from grpo_jax.rollout.rollout import collect
from grpo_jax.runs.loading import load
from grpo_jax.runs.policy import run_config

COUNT, LOW = 6, 0.375


@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_all_draws_of_k_that_hold_a_pass(k):
    """Over every subset of k of n completions, by hand."""
    passed = np.array([0, 1, 3, 5])
    draws = [list(itertools.combinations([number < c for number in range(5)], k)) for c in passed]
    np.testing.assert_allclose(
        pass_at_k(passed, np.full(4, 5), k), [np.mean([any(d) for d in all_of]) for all_of in draws]
    )


def test_pass_at_k_of_many_completions_is_finite_and_of_too_few_there_is_none():
    came = pass_at_k(np.array([3, 2, 0]), np.array([4000, 2, 0]), 100)
    assert came[0] == pytest.approx(1 - math.comb(3997, 100) / math.comb(4000, 100), rel=1e-9)
    assert np.isnan(came[1:]).all()


def test_intervals_cover_the_mean_at_their_rate():
    rng = np.random.default_rng(0)
    found = [mean_interval(rng.exponential(size=200)) for _ in range(1000)]
    assert 0.93 < np.mean([interval.low < 1 < interval.high for interval in found]) < 0.97
    assert mean_interval(np.array([2.0, np.nan]))[:1] == (2.0,) and np.isnan(mean_interval(np.array([2.0, np.nan])).low)
    assert np.isnan(mean_interval(np.array([np.nan]))).all()


@pytest.fixture(scope="module")
def run(place, tmp_path_factory):
    """One step in which all is named that changes how completions are drawn and measured."""
    folder = tmp_path_factory.mktemp("steered")
    values = yaml.safe_load(place.config.read_text())
    values |= {"algorithm": {}, "optimizer": {"learning_rate": 0.01, "warmup_steps": 3}}
    values["training"] = {"prompts_per_batch": 4, "max_steps": 1, "save_every": 0}
    values["sampling"] = {"group_size": 10, "max_new_tokens": 12, "stop": [*"0123456789", "aa", *"ABCDEFGH"]}
    values["data"] |= {"forbidden_tokens": ["b", *"cdefg", 40]}
    values["evaluation"] = {"every": 0, "samples": 6, "temperature": 0.7, "pass_threshold": 0.375}
    train_values(values, folder / "run", judge="work:0")
    return folder / "run"


def test_a_run_reports_mean_and_pass_at_k(run, monkeypatch):
    """Drawn and judged again by hand, with the settings of the evaluation and not of training."""
    monkeypatch.setenv("JUDGE_RUN", str(run))
    config = run_config(run)
    by_hand = config.sampling.replace(group_size=COUNT, temperature=0.7)
    ctx = load(config.replace(sampling=by_hand), lambda *_: None)
    rollout = collect(
        *(ctx.fns, ctx.samplers.training, ctx.policy.variables, ctx.test_rows),
        key=ctx.key,
        iteration=None,
    )
    letters, brief = np.moveaxis(rollout.final_rewards.astype(float), -1, 0)
    summary = json.loads((run / "summary.json").read_text())
    samples, measures = summary["samples"], summary["samples"]["measures"]
    assert (samples["k"], samples["temperature"], samples["top_k"], samples["threshold"]) == (COUNT, 0.7, 0, LOW)
    over_all = [f"mean@{COUNT}", f"best@{COUNT}"]
    assert list(measures) == ["letters", "brief", "total"] and list(measures["total"]) == over_all
    assert list(measures["letters"]) == [*over_all, "pass@1", "pass@2", "pass@4", f"pass@{COUNT}"]
    for name, drawn in (("letters", letters), ("brief", brief), ("total", letters + 0.5 * brief)):
        mean, low, high = measures[name][f"mean@{COUNT}"]["before"]
        assert mean == pytest.approx(drawn.mean(), rel=1e-5)
        assert mean == pytest.approx(summary["evaluation"][name]["before_sampled"], rel=1e-5)
        half = 1.96 * drawn.mean(1).std(ddof=1) / np.sqrt(len(drawn))
        assert (low, high) == pytest.approx((mean - half, mean + half), abs=1e-4)
        best = measures[name][f"best@{COUNT}"]["before"][0]
        assert best == pytest.approx(drawn.max(1).mean(), rel=1e-5)
    shares = [
        values
        for name in ("letters", "brief")
        for key, when in measures[name].items()
        if key.startswith("pass")
        for values in when.values()
    ]
    assert all(0 <= low <= share <= high <= 1 for share, low, high in shares)
    passes = (letters >= LOW).sum(1)
    assert 0 < passes.sum() < letters.size
    assert measures["letters"]["pass@1"]["before"][0] == pytest.approx(passes.mean() / COUNT)
    pairs = [1 - math.comb(COUNT - int(c), 2) / math.comb(COUNT, 2) for c in passes]
    assert measures["letters"]["pass@2"]["before"][0] == pytest.approx(np.mean(pairs))
    assert measures["letters"][f"pass@{COUNT}"]["before"][0] == pytest.approx((passes > 0).mean())
    assert measures["total"][f"mean@{COUNT}"]["after"] != measures["total"][f"mean@{COUNT}"]["before"]


def test_terminal_and_report_show_mean_and_pass_at_k(run):
    before, after = (
        json.loads((run / "summary.json").read_text())["samples"]["measures"]["letters"]["pass@2"][when]
        for when in ("before", "after")
    )
    told = "{:.3f} [{:.3f}, {:.3f}]"
    log, page = (run / "train.log").read_text(), (run / "report.html").read_text()
    (line,) = [line for line in log.splitlines() if line.split()[:2] == ["letters", "pass@2"]]
    assert told.format(*before) in line and line.endswith(told.format(*after))
    assert (
        f'<td class="text">{told.format(*after)}</td>' in page
        and f"{COUNT} completions of each held-out prompt" in page
    )


def test_evaluate_takes_other_settings(run, capsys, monkeypatch):
    monkeypatch.setenv("JUDGE_RUN", str(run))
    assert evaluate.main(["--run", str(run), "--json"]) == 0
    found, summary = json.loads(capsys.readouterr().out), json.loads((run / "summary.json").read_text())
    for name, statistics in found["samples"]["measures"].items():
        for statistic, values in statistics.items():
            assert values["final"] == summary["samples"]["measures"][name][statistic]["after"]
    assert evaluate.main(["--run", str(run), "--samples", "2", "--temperature", "1.5"]) == 0
    told = capsys.readouterr().out
    assert "2 completions of each held-out prompt at temperature 1.5." in told and "pass@2" in told
    assert "pass@4" not in told


def test_completions_are_as_the_config_says(run):
    table = pyarrow.parquet.read_table(run / "completions" / "step_000001.parquet").to_pylist()
    stops, texts = run_config(run).sampling.stop, [row["raw_completion"] for row in table]
    assert not any(letter in text for text in texts for letter in "bcdefg")
    stopped = [text for text in texts if any(stop in text for stop in stops)]
    assert len(stopped) > 5
    for text in stopped:  # nothing behind it: the stop string is complete with the last token
        assert any(text.endswith(stop) for stop in stops) and not any(stop in text[:-1] for stop in stops)
    # Every token is a byte: a text of so many tokens without a stop string was cut, or ended by itself.
    assert not any(row["truncated"] for row in table if row["raw_completion"] in stopped)


def test_predict_honours_the_sampling_settings(run):
    rewrite = load_rewriter(run)
    texts = [rewrite(f"{letter} tree") for letter in "abcdef"]
    assert not any(stop in text[:-1] for stop in run_config(run).sampling.stop for text in texts)
    assert not any(letter in text for text in texts for letter in "bcdefg")
    assert any(texts)
