"""The recommendation task through the command: each error is one line."""

import pytest

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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task.catalogue": "none.tsv"}, "none.tsv: cannot be read (No such file"),
        ({"task.source": "dummy"}, "the dummy world has its own"),
        ({"task.source": "data.parquet"}, "expected dummy, a .txt of sequences or a .csv of events"),
        ({"task.template": "{titles}"}, "expected one of {history}, {last}, {items} in it"),
        ({"task.history_items": 0}, "task.history_items: expected a number >= 1"),
        ({"task.retrieval.budget": 5}, "task.retrieval.budget: no such field; it was removed: a call"),
        ({"rewards": '[{"name": "recall"}]'}, "or of this task hit, mrr, ndcg, rank, soft; got 'recall'"),
        ({"rewards": '[{"name": "ndcg", "options": {"k": 1.5}}]'}, "k must be a whole number"),
        ({"rewards": '[{"name": "ndcg", "options": {"k": .inf}}]'}, "k must be a whole number"),
        ({"rewards": '[{"name": "hit", "options": {"k": 8}}]'}, "rewards.hit.options: k must be at most 7, the number"),
        ({"rewards": '[{"name": "ndcg", "options": {"map": 1.0}}]'}, "expected arguments of the reward (k), got 'map'"),
        ({"rewards": '[{"name": "own.py:reward"}]'}, "own.py"),
        ({"eval_rewards": '["recall@5"]'}, "mrr, ndcg, ndcg@10, ndcg@5, rank, soft; got 'recall@5'"),
        ({"task.retrieval.encoder": "no/such-model"}, "no/such-model"),
        ({"sft.batch": 64}, "sft.batch: expected at most"),
        ({"data.prompts": "rows.jsonl"}, "data.prompts: expected nothing: prompts are made of histories"),
        ({"data.columns.user_id": "customer"}, "data.columns: expected one of title, got 'user_id'"),
        ({"data.max_prompt_tokens": 3}, "max_prompt_tokens"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_clear_line(changes, message, folder, tmp_path, capsys):
    assert main(command(folder, tmp_path / "run", **changes)) == 2
    written = capsys.readouterr().err
    assert written.startswith("error: ") and message in written
    assert written.count("\n") == 1 and "Traceback" not in written
