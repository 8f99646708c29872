"""Several objects through the command: the oracle draws every kind, and each kind is measured by itself."""

import json

import numpy as np
import pyarrow.parquet
import pytest

from bridges.miniature.scenes import KINDS
from grpo_jax import train
from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError

pytest.importorskip("open_clip")
pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One iteration so hot that some answers cannot be read."""
    run_dir = tmp_path_factory.mktemp("scenes") / "run"
    small = {
        "sampling.temperature": 4, "sampling.group_size": 8, "training.prompts_per_batch": 4, "training.max_steps": 1,
        "training.inner_epochs": 1, "algorithm.advantage": "grpo", "rewards": "[alignment]", "report_to": "[]",
        "evaluation.prompts": 48, "evaluation.validation_prompts": 1, "evaluation.every": 0, "evaluation.samples": 0,
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in small.items()]
    assert train.main(["--config=prompt_enhancement_scenes", *words, f"--run_dir={run_dir}"]) == 0
    return run_dir


def test_each_kind_is_measured_and_its_oracle_is_right(run):
    evaluation = json.loads((run / "summary.json").read_text())["evaluation"]
    pixels = evaluation["pixel_accuracy"]
    assert pixels["oracle"] >= 0.95 and pixels["before"] <= 0.4 and pixels["unchanged"] <= 0.4
    kinds = [evaluation[f"pixel_accuracy/{kind}"] for kind in KINDS]
    assert [kind["oracle"] >= 0.85 for kind in kinds] == [True] * 6
    for when in ("before", "after", "oracle"):  # 8 prompts of each of the 6 kinds
        assert sum(kind[when] for kind in kinds) / 6 == pytest.approx(pixels[when])


def test_an_invalid_answer_earns_the_worst_of_its_group(run):
    (row,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    table = pyarrow.parquet.read_table(run / "completions" / "step_000001.parquet").to_pydict()
    valid, reward, advantage = (
        np.array(table[name]).reshape(4, 8) for name in ("valid", "reward/alignment", "advantage")
    )
    assert 0 < row["invalid"] < 1 and np.isfinite(reward).all()  # told as it was judged
    said = np.array(table["text"]) == np.array(table["prompt"])
    assert said.reshape(4, 8)[~valid].all()  # what was drawn
    learned = np.where(valid, reward, np.where(valid, reward, np.inf).min(1, keepdims=True)).astype(float)
    centred = learned - np.nanmean(learned, axis=1, keepdims=True)
    expected = np.nan_to_num(centred / (np.nanstd(learned, axis=1, ddof=1, keepdims=True) + 1e-4))
    np.testing.assert_allclose(advantage, expected, rtol=1e-3, atol=1e-3)
    assert row["reward/total/mean"] == pytest.approx(np.nanmean(learned), abs=1e-5)


def test_a_column_that_prompts_have_not_is_one_line(tmp_path, capsys):
    few = ["--evaluation.prompts=2", "--evaluation.validation_prompts=1", "--evaluation.samples=0"]
    run_dir = f"--run_dir={tmp_path / 'run'}"
    assert train.main(["--config=prompt_enhancement_scenes", *few, "--evaluation.by=kinds", run_dir]) == 2
    assert "evaluation.by: 2 of 2 held-out prompts have no column 'kinds'" in capsys.readouterr().err


def test_a_checker_reads_what_it_knows():
    values = {"data": {"prompts": "builtin"}, "eval_rewards": ["pixel_accuracy"]}
    with pytest.raises(UserError, match=r'data\.prompts "miniature" or "miniature_scenes"'):
        make_config(task="prompt_enhancement", **values)
