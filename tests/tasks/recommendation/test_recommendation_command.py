"""The recommendation task through the command: a GPT-2 that writes queries, W&B, mistakes."""

import json
from importlib import import_module
from importlib.util import find_spec

import pytest

from grpo_jax.recommend import main as recommend
from grpo_jax.train import main

TITLES = ("red soap", "blue soap", "rosé cream", "hand cream", "nail brush", "shaving brush", "night palette")
ITEMS = "id\ttitle\n" + "".join(f"{name}\t{title}\n" for name, title in zip("abcdefg", TITLES, strict=True))
USERS = "".join(f"u{n} {' '.join('abcdefg'[n % 3 : n % 3 + 5])}\n" for n in range(9))
TINY = {
    "report_to": "[]",
    "task.writes": "query",
    "task.prior.history": 50,
    "sampling.max_new_tokens": 5,
    "data.max_prompt_tokens": 32,
    "policy.new.width": 16,
    "sft.steps": 2,
    "sft.batch": 2,
    "sampling.group_size": 4,
    "training.prompts_per_batch": 2,
    "training.max_steps": 2,
    "evaluation.prompts": 9,
    "evaluation.every": 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "items.tsv").write_text(ITEMS)
    (folder / "sequential.txt").write_text(USERS)
    return folder


def command(folder, run_dir, **changes):
    files = {"task.source": folder / "sequential.txt", "task.catalogue": folder / "items.tsv"}
    options = {**TINY, **files, "run_dir": run_dir, **changes}
    return ["--config", "recommendation_quick", *(f"--{name}={value}" for name, value in options.items())]


@pytest.fixture(scope="module")
def run(folder):
    """A new policy that writes queries, reported to W&B where that is installed."""
    changes = {"policy.new.window": 37}
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("wandb"):
            patch.setenv("WANDB_MODE", "offline")
            changes["report_to"] = '["wandb"]'
        try:
            assert main(command(folder, folder / "run", **changes)) == 0
        finally:
            if find_spec("wandb"):
                import_module("wandb").teardown()
    return folder / "run"


def test_a_new_policy_learns_and_is_exported(run):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    start, end = (AutoModelForCausalLM.from_pretrained(run / name) for name in ("policy_start", "policy"))
    assert end.config.model_type == "llama" and end.config.max_position_embeddings == 37
    assert all(not torch.equal(a, b) for a, b in zip(start.parameters(), end.parameters(), strict=True))


def test_measures_are_reported_to_wandb(run):
    pytest.importorskip("wandb")
    summary = json.loads((run / "summary.json").read_text())
    (logged,) = (run / "wandb").glob("offline-run-*")
    (stream,) = logged.glob("*.wandb")
    stored = stream.read_bytes()
    for name in (b"reward/total/mean", b"eval_rewards/ndcg@10/mean", b"baseline_reward", b"improvement"):
        assert name in stored
    assert json.dumps(summary["reward"]).encode() in stored


def test_a_policy_that_writes_queries_recommends(run, capsys):
    """A letter and its accent are one character in the file, and two in the question."""
    assert recommend(["--run", str(run), "--history", "blue soap | rose\u0301 cream", "--k", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["items"]) == 3 and not {"b", "c"} & {item["item"] for item in answer["items"]}
    assert "note" not in answer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task.catalogue": "none.tsv"}, "none.tsv does not exist: expected a catalogue"),
        ({"task.catalogue": ""}, "task.catalogue: expected a file with the titles"),
        ({"task.source": "dummy"}, "the dummy world has its own"),
        ({"task.source": "data.parquet"}, "expected dummy, a .txt of sequences or a .csv of events"),
        ({"task.order_column": "asin"}, "task.order_column: expected one of [], got 'asin'"),
        ({"task.template": "{titles}"}, "expected one of {history}, {last}, {items} in it"),
        ({"task.history_items": 0}, "task.history_items: expected a number >= 1"),
        ({"task.retrieval.budget": 5}, "task.retrieval.budget: no such field; it left: 5 calls"),
        ({"rewards": '[{"name": "recall"}]'}, "or of this task hit, mrr, ndcg, rank, soft; got 'recall'"),
        ({"rewards": '[{"name": "ndcg", "options": {"k": 1.5}}]'}, "k must be a whole number"),
        ({"rewards": '[{"name": "hit", "options": {"k": 8}}]'}, "rewards.hit.options: k must be at most 7, the number"),
        ({"rewards": '[{"name": "ndcg", "options": {"map": 1.0}}]'}, "got an unexpected keyword argument 'map'"),
        ({"rewards": '[{"name": "own.py:reward"}]'}, "own.py"),
        ({"eval_rewards": '["recall@5"]'}, "mrr, ndcg, ndcg@10, ndcg@5, rank, soft; got 'recall@5'"),
        ({"task.retrieval.encoder": "no/such-model"}, "no/such-model"),
        ({"sft.batch": 64}, "sft.batch: expected at most"),
        ({"data.prompts": "rows.jsonl"}, "data.prompts: expected nothing: prompts are made of histories"),
        ({"data.columns.user_id": "customer"}, "data.columns: expected one of title, got 'user_id'"),
        ({"data.columns.title": "name"}, "the header has no column 'name', it says ['id', 'title']"),
        ({"data.max_prompt_tokens": 3}, "max_prompt_tokens"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_clear_line(changes, message, folder, tmp_path, capsys):
    assert main(command(folder, tmp_path / "run", **changes)) == 2
    written = capsys.readouterr().err
    assert written.startswith("error: ") and message in written
    assert written.count("\n") == 1 and "Traceback" not in written
