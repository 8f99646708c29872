"""A policy that ranks titles: a run through the command, and its recommendations."""

import json
import math

import jax
import numpy as np
import pyarrow.parquet as parquet
import pytest
import yaml
from support.shop_files import write_shop

from grpo_jax.predict import main as predict_main
from grpo_jax.recommend import load_recommender
from grpo_jax.recommend import main as recommend_main
from grpo_jax.rollout.encoding import choices_trie, make_encode
from grpo_jax.runs.policy import restore_policy
from grpo_jax.sampling.samplers import completion_tokens
from grpo_jax.tasks.recommendation.baselines import target_ranks
from grpo_jax.tasks.recommendation.dataset import load_dataset, make_world
from grpo_jax.tasks.recommendation.loading import policy_ranking
from grpo_jax.train import main
from grpo_jax.training.batch import Batch
from grpo_jax.training.objectives import make_forward

RUN = {
    "task": {"kind": "recommendation", "writes": "title", "template": "{last}"},
    "policy": {"path": "new", "new": {"width": 16, "layers": 1, "heads": 2, "window": 16}, "remat": "none"},
    "sft": {"steps": 8, "batch": 16, "learning_rate": 5e-3},
    "sampling": {"group_size": 8, "max_new_tokens": 5},
    "data": {"max_prompt_tokens": 10},
    "algorithm": {"preset": "grpo"},
    "training": {"prompts_per_batch": 16, "max_steps": 1, "save_every": 0},
    "rewards": [{"name": "hit", "options": {"k": 1}}],
    "evaluation": {"prompts": 16, "validation_prompts": 8, "every": 0, "samples": 0},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("titles")
    task = RUN["task"] | write_shop(folder, make_world(users=60, items=280))
    (folder / "config.yaml").write_text(yaml.safe_dump(RUN | {"task": task}))
    assert main([f"--config={folder / 'config.yaml'}", f"--run_dir={folder / 'run'}"]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def restored(run):
    config, policy, _ = restore_policy(run, "final")
    return config, policy, load_dataset(config.task)


def test_every_completion_is_an_item_and_is_rewarded_as_a_hit(run, restored):
    titles = {row.prompt: row.columns["target_title"] for row in restored[2].prompts.train}
    table = parquet.read_table(next((run / "completions").glob("*.parquet"))).to_pylist()
    assert {line["completion"] for line in table} <= set(restored[2].catalogue.titles)
    assert [line["reward/hit"] for line in table] == [line["completion"] == titles[line["prompt"]] for line in table]


def test_what_is_measured_are_the_ranks_by_the_log_probabilities_of_titles(run, restored):
    """Against a forward pass over each title alone."""
    config, policy, dataset = restored
    loaded, rows, titles = policy.folder, dataset.prompts.test[:16], dataset.catalogue.titles
    trie = choices_trie(config, config.task.choices(config), loaded)
    encode = make_encode(loaded.tokenizer, config.data, pad_id=loaded.pad_id, vocab_size=loaded.config.vocab_size,
                         rows=rows, image_processor=None)  # fmt: skip
    after_text = {"plain": True, "gap": True}
    ids = [completion_tokens(loaded.tokenizer, title, loaded.eos_ids, **after_text) for title in titles]
    ids = np.array(ids, np.int32)
    prompt = encode(rows)
    tokens = np.broadcast_to(ids, (len(rows), *ids.shape))
    batch = Batch(prompt.tokens, prompt.mask, tokens, np.ones(tokens.shape, bool))
    forward = jax.jit(make_forward(policy, temperature=1.0, trie=trie))
    scores = np.asarray(forward(policy.variables, batch).logprobs).sum(-1)
    np.testing.assert_allclose(policy_ranking(config, policy, dataset.catalogue, rows)(rows), scores, atol=1e-4)
    columns = [row.columns for row in rows]
    targets, histories = ([one[name] for one in columns] for name in ("target_row", "history"))
    ranks = target_ranks(scores, np.array(targets), histories)
    measured = json.loads((run / "summary.json").read_text())["evaluation"]["mrr"]["after"]
    assert measured == pytest.approx(np.mean(1 / ranks), abs=2e-3) and max(ranks) > 100


def test_scores_of_what_is_recommended_are_probabilities_of_the_whole_catalogue(run, restored, capsys):
    titles = restored[2].catalogue.titles
    found = load_recommender(run)([titles[3]], 280)
    assert len(found) == 279 and 0.5 < sum(math.exp(item.score) for item in found) < 1
    assert found[0].score > found[-1].score
    assert recommend_main(["--run", str(run), "--history", titles[3], "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["items"]
    assert [item["item"] for item in told] == [item.item for item in found[:10]]
    for words, wrong in (
        (["--history", "i1", "--k", "0"], "--k: expected a number >= 1"),
        (["--file", "absent.txt"], "--file: absent.txt: cannot be read"),
        (["--history", "i1", "--checkpoint", "99"], "99"),
    ):
        assert recommend_main(["--run", str(run), *words]) == 2
        assert wrong in capsys.readouterr().err


def test_predict_writes_a_title_of_the_catalogue(run, restored, capsys):
    titles = restored[2].catalogue.titles
    assert predict_main(["--run", str(run), "--prompt", titles[3], titles[200], "chair"]) == 0
    written = capsys.readouterr().out.splitlines()
    assert len(written) == 3 and set(written) <= set(titles)
