"""Training through the command with a retrieval service over real Ray: the same run, also when its actor dies."""

import json
import os

import pytest

ray = pytest.importorskip("ray")

from bridges.retrieval import service  # noqa: E402
from grpo_jax.config.judge import PoolSection  # noqa: E402
from grpo_jax.config.retrieval import RetrievalSection  # noqa: E402
from grpo_jax.tasks.recommendation.dummy import make_catalogue_of_words  # noqa: E402
from grpo_jax.train import main  # noqa: E402

# Wide: bridges/retrieval/test_retrieval_ray.py holds that ranks are those in process and what becomes of an actor.
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.wide]

TRAINING = 16  # completions of one batch; evaluations have others
OPTIONS = {
    "report_to": "[]",
    "task.writes": "query",
    "sampling.max_new_tokens": 5,
    "data.max_prompt_tokens": 32,
    "task.dummy_users": 40,
    "task.dummy_items": 280,
    "policy.new.width": 16,
    "sft.steps": 3,
    "sft.batch": 8,
    "sampling.group_size": 4,
    "training.prompts_per_batch": 4,
    "training.max_steps": 3,
    "training.save_every": 1,
    "evaluation.prompts": 12,
    "evaluation.validation_prompts": 8,
    "evaluation.every": 0,
    "task.retrieval.attempts": 1,
    "task.retrieval.budget": 0,
}


def make_faulty(folder):
    """What the actor loads, which does what folder/orders says, "N:order …", in the N-th training batch.

    Made in a function, so that Ray sends its code along; batches are counted in a file, which survives the actor.
    """

    class Faulty(service.RankService):
        def count(self, queries, scale):
            counts = super().count(queries, scale)
            if len(queries.targets) != TRAINING:
                return counts
            calls = folder / "calls"
            calls.write_text(calls.read_text() + "x")
            orders = dict(order.split(":") for order in (folder / "orders").read_text().split())
            order = orders.get(str(len(calls.read_text())))
            if order == "die":  # and be started again
                os._exit(1)
            if order == "leave":  # for good
                ray.actor.exit_actor()
            return counts._replace(score=counts.score * float("nan")) if order == "nan" else counts

    return Faulty


@pytest.fixture(scope="module")
def serve(cluster, tmp_path_factory):
    """serve(orders): from now on the service has these faults; "" ends it and starts another, which has none."""
    folder = tmp_path_factory.mktemp("service")
    running = []

    def start(orders):
        (folder / "orders").write_text(orders)
        (folder / "calls").write_text("")
        if orders == "" and running:
            running.pop().close()  # as Ctrl-C does
        if not running:
            titles = make_catalogue_of_words(280).titles
            kind = make_faulty(folder)
            section, pool = (
                RetrievalSection(cache=str(folder / "cache")),
                PoolSection(replicas=1, resources={"num_cpus": 0.5}),
            )
            running.append(service.start_service(titles, section, pool, judge=kind))
        return folder / "calls"

    yield start
    for backend in running:
        backend.close()


def train(run_dir, **changes):
    options = {**OPTIONS, "run_dir": run_dir, **changes}
    return main(["--config", "recommendation_quick", *(f"--{name}={value}" for name, value in options.items())])


def rows_of(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times = ("seconds/", "tokens_per_second")
    return [{name: value for name, value in row.items() if not name.startswith(times)} for row in rows]


def table_of(run_dir):
    return json.loads((run_dir / "summary.json").read_text())["table"]


@pytest.fixture(scope="module")
def in_process(tmp_path_factory):
    """A run that knows nothing of Ray."""
    run_dir = tmp_path_factory.mktemp("runs") / "in_process"
    assert train(run_dir) == 0
    return run_dir


def test_an_actor_that_dies_changes_nothing_and_a_failed_call_is_missing_rewards(in_process, serve, tmp_path):
    calls = serve("2:die 4:nan")
    assert train(tmp_path / "run", **{"task.retrieval.backend": "ray", "task.retrieval.budget": 1}) == 0
    assert len(calls.read_text()) == 4  # three batches, the second one twice
    rows, undisturbed = rows_of(tmp_path / "run"), rows_of(in_process)
    assert rows[:2] == undisturbed[:2]
    assert [row["missing/ndcg"] for row in rows] == [0, 0, 1]
    assert rows[2]["reward/ndcg/mean"] is None and rows[2]["loss"] == 0 and rows[2]["mean_advantage"] == 0
    assert all(row["missing"] == 0 for row in table_of(tmp_path / "run"))
    assert "service 'retrieval' over Ray" in (tmp_path / "run" / "train.log").read_text()


def test_an_actor_that_is_gone_stops_the_run_which_goes_on_with_another(in_process, serve, tmp_path, capsys):
    serve("2:leave")
    changes = {"task.retrieval.backend": "ray", "task.retrieval.attempts": 2}
    assert train(tmp_path / "run", **changes) == 2
    written = capsys.readouterr().err
    assert written.splitlines()[-1].startswith("error: the retrieval failed in 1 of the last")
    assert "Saved after iteration 1; go on with --resume" in written and "Traceback" not in written
    again = ["--resume", "--run_dir", str(tmp_path / "run")]
    assert main(again) == 2
    written = capsys.readouterr().err
    assert written.startswith("error: RetrievalService not found: 'retrieval' (its actor is dead")
    assert "python -m bridges.retrieval serve" in written and written.count("\n") == 1
    serve("")
    assert main(again) == 0
    assert rows_of(tmp_path / "run") == rows_of(in_process)
    assert table_of(tmp_path / "run") == table_of(in_process)
