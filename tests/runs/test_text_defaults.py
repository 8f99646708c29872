"""`--task text` alone: a learning rate that is safe for what is trained, and nothing of another config."""

import pytest
from support.text_task import rows

from grpo_jax.config import make_config
from grpo_jax.config.command_line import load_config
from grpo_jax.train import main


def test_a_text_run_is_made_of_its_own_defaults(place, tmp_path, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setenv("JUDGE_RUN", str(run))
    monkeypatch.setenv("JUDGE", "work:0")
    said = [f"--policy.path={place.policy}", f"--data.prompts={place.folder / 'prompts.jsonl'}", "--data.held_out=0"]
    small = ["--training.prompts_per_batch=4", "--training.max_steps=2", "--sampling.max_new_tokens=4"]
    rewards = ["--rewards", f'[{{"name": "{place.judge}:brief"}}]']
    assert main(["--task", "text", f"--run_dir={run}", *said, *small, *rewards]) == 0
    table = rows(run)
    assert [row["learning_rate"] for row in table] == pytest.approx([1e-6, 1e-6])
    assert make_config(task="text", policy={"lora": {"rank": 2}}).learning_rate == 1e-4
    assert not [name for name in table[0] if name.startswith("watch/")] and table[0]["kl"] == 0
    config, plain = load_config(run / "config.yaml"), make_config(task="text")
    assert (config.algorithm, config.ppo, config.optimizer) == (plain.algorithm, plain.ppo, plain.optimizer)
    assert (config.watch, config.judges, config.warm_start) == ([], {}, plain.warm_start)
    assert plain.sampling.max_new_tokens == 128 and config.sampling.group_size == plain.sampling.group_size == 8
