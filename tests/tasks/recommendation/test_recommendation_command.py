"""The recommendation task through the command, with what a newcomer tries: the quick config, a GPT-2, W&B, mistakes."""

import json

import pytest

from grpo_jax.train import main

TINY = {
    "task.writes": "query",
    "sampling.group": "samples",
    "sampling.max_new_tokens": 5,
    "data.max_prompt_tokens": 32,
    "task.dummy_users": 40,
    "task.dummy_items": 280,
    "policy.new.width": 16,
    "warm_start.steps": 2,
    "warm_start.batch": 8,
    "sampling.group_size": 4,
    "training.prompts_per_batch": 4,
    "training.max_steps": 2,
    "evaluation.prompts": 12,
    "evaluation.every": 0,
}
ITEMS = "id\ttitle\n" + "".join(f"{name}\t{title}\n" for name, title in zip("abcdefg", (
    "red soap", "blue soap", "rose cream", "hand cream", "nail brush", "shaving brush", "night palette",
), strict=True))  # fmt: skip
USERS = "".join(f"u{n} {' '.join('abcdefg'[n % 3 : n % 3 + 5])}\n" for n in range(9))


def command(run_dir, **changes):
    options = {**TINY, "run_dir": run_dir, "report_to": "[]", **changes}
    return ["--config", "recommendation_quick", *(f"--{name}={value}" for name, value in options.items())]


@pytest.mark.slow
def test_a_new_gpt2_learns_is_exported_and_reported_to_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    changes = {"policy.new.architecture": "gpt2", "policy.new.window": 37, "report_to": '["wandb"]'}
    try:
        assert main(command(run, **changes)) == 0
    finally:
        wandb.teardown()
    summary = json.loads((run / "summary.json").read_text())

    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    start, end = (AutoModelForCausalLM.from_pretrained(run / name) for name in ("policy_start", "policy"))
    assert end.config.model_type == "gpt2" and end.config.n_positions == 37
    changed = [not torch.equal(a, b) for a, b in zip(start.parameters(), end.parameters(), strict=True)]
    assert all(changed)

    (logged,) = (run / "wandb").glob("offline-run-*")
    (stream,) = logged.glob("*.wandb")
    stored = stream.read_bytes()
    for name in (b"reward/total/mean", b"watch/ndcg@10/mean", b"baseline_reward", b"improvement"):
        assert name in stored
    assert json.dumps(summary["reward"]).encode() in stored
    stored = [json.loads(path.read_text()) for path in logged.glob("files/media/table/**/*.table.json")]
    rankings = [table["data"] for table in stored if {"method", "HR@5", "NDCG@100", "MRR"} < set(table["columns"])]
    methods = [row["method"] for row in summary["table"] if row["group"] == "all"]
    assert methods[-1] == "policy, after"
    assert methods in [[row[0] for row in ranking] for ranking in rankings]


@pytest.fixture
def files(tmp_path):
    """Options that name a catalogue and a sequence file."""
    (tmp_path / "items.tsv").write_text(ITEMS)
    (tmp_path / "sequential.txt").write_text(USERS)
    return {"task.source": tmp_path / "sequential.txt", "task.catalogue": tmp_path / "items.tsv"}


FEW = {"training.prompts_per_batch": 2, "warm_start.batch": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task.source": "none.txt"}, "none.txt does not exist: expected a line per user"),
        ({"task.catalogue": "none.tsv"}, "none.tsv does not exist: expected a catalogue"),
        ({"task.catalogue": ""}, "task.catalogue: expected a file with the titles"),
        ({"task.source": "data.parquet"}, "expected dummy, a .txt of sequences or a .csv of events"),
        ({"task.prompts": "none.json"}, "none.json does not exist"),
        ({"task.order_column": "asin"}, "order_column must be one of [], got 'asin'"),
        ({"task.template": "{titles}"}, "expected one of {history}, {last}, {items} in it"),
        ({"task.history_items": 0}, "items must be at least 1"),
        ({"task.decay": 2}, "task.decay: expected a number in [0, 1]"),
        ({"rewards": '[{"name": "recall"}]'}, "or of this task hit, mixed, mrr, ndcg, rank, soft; got 'recall'"),
        ({"rewards": '[{"name": "ndcg", "options": {"k": 1.5}}]'}, "k must be a whole number"),
        ({"rewards": '[{"name": "hit", "options": {"k": 8}}]'}, "rewards.hit.options: k must be at most 7, the number"),
        ({"rewards": '[{"name": "own.py:reward"}]'}, "own.py"),
        ({"watch": '["recall@5"]'}, "hit, hr@10, hr@5, mixed, mrr, ndcg, ndcg@10, ndcg@5, rank, soft; got 'recall@5'"),
        ({"task.retrieval.encoder": "no/such-model"}, "no/such-model"),
        ({"task.retrieval.temperature": 0}, "task.retrieval.temperature: expected a number > 0"),
        ({"warm_start.batch": 64}, "warm_start.batch: expected at most"),
        ({"training.prompts_per_batch": 64}, "64"),
        ({"data.prompts": "rows.jsonl"}, "data.prompts: expected nothing: prompts are made of histories"),
        ({"data.columns.user_id": "customer"}, "data.columns: expected one of title, got 'user_id'"),
        ({"data.columns.title": "name"}, "the header has no column 'name', it says ['id', 'title']"),
        ({"data.test": "rows.jsonl"}, "data.test: expected nothing: prompts are made of histories"),
        ({"data.max_prompt_tokens": 3}, "max_prompt_tokens"),
        ({"policy.path": "no_folder"}, "no_folder"),
        ({"policy.new.heads": 5}, "policy.new.heads: expected a number that divides width"),
        ({"policy.new.architecture": "gpt2", "policy.new.window": 36}, "positions for 36 only"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_clear_line(changes, message, files, tmp_path, capsys):
    assert main(command(tmp_path / "run", **{**files, **FEW, **changes})) == 2
    written = capsys.readouterr().err
    assert written.startswith("error: ") and message in written
    assert written.count("\n") == 1 and "Traceback" not in written
