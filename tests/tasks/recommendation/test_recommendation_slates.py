"""Lists that are judged as a whole: their rewards against loops, and a run through the commands."""

import itertools
import json
import warnings

import numpy as np
import pyarrow.parquet as parquet
import pytest
from support.stopping import stopped_after

from grpo_jax.evaluate import main as evaluate_main
from grpo_jax.predict import load_rewriter
from grpo_jax.recommend import load_recommender
from grpo_jax.recommend import main as recommend_main
from grpo_jax.tasks.recommendation.baselines import taken_counts, title_vectors
from grpo_jax.tasks.recommendation.catalogue import item_word, items_of, make_catalogue
from grpo_jax.tasks.recommendation.dataset import history_prompt, load_dataset, warm_start_pairs
from grpo_jax.tasks.recommendation.dummy import make_world
from grpo_jax.tasks.recommendation.slates import ranks_of, slate_of, slate_rewards, tail_items, values_of
from grpo_jax.tasks.recommendation.task import Recommendation
from grpo_jax.train import main

WORLD = make_world(users=120, items=280, fickle=0.3, seed=0)
CATALOGUE = WORLD.catalogue
COUNTS = taken_counts(WORLD.sequences.users, len(CATALOGUE))
SHORT = [
    *("--config=recommendation_slates", "--task.dummy_users=120", "--task.dummy_items=280", "--policy.new.width=16"),
    *("--warm_start.steps=120", "--warm_start.batch=32", "--training.prompts_per_batch=8", "--training.max_steps=3"),
    *("--sampling.group_size=4", "--evaluation.prompts=40", "--evaluation.validation_prompts=8", "--report_to=[]"),
    *("--training.save_every=2", "--evaluation.every=0"),
]


def lists(seed=0, count=20):
    random = np.random.default_rng(seed)
    return [tuple(random.permutation(len(CATALOGUE))[: random.integers(1, 11)].tolist()) for _ in range(count)]


def earned(name, slates, catalogue=CATALOGUE, counts=COUNTS, **options):
    reward = slate_rewards(catalogue, counts)[name].make(**options)
    return reward(completions=[""] * len(slates), slate=slates, rank=[1.0] * len(slates))


def test_exposure_is_the_share_that_wanted_items_have_of_what_places_count():
    tail = tail_items(COUNTS, 0.3)
    assert tail.sum() == 280 - 84 and COUNTS[~tail].min() >= COUNTS[tail].max()
    for name, wanted, options in (("tail", tail, {"head": 0.3}), ("new", COUNTS <= 2, {"most": 2})):
        for slate, value in zip(lists(), earned(name, lists(), **options), strict=True):
            shares = [1 / np.log2(1 + place) for place in range(1, len(slate) + 1)]
            found = sum(share for share, item in zip(shares, slate, strict=True) if wanted[item])
            assert value == pytest.approx(found / sum(shares))
    assert earned("new", [(0, 1)], counts=np.zeros(280)) == [1.0]


def test_diversity_is_one_less_the_mean_over_pairs():
    vectors = title_vectors(CATALOGUE.titles).toarray()
    kinds = np.array(CATALOGUE.columns["kind"])
    for by, alike in (("title", lambda a, b: vectors[a] @ vectors[b]), ("kind", lambda a, b: kinds[a] == kinds[b])):
        for slate, value in zip(lists(1), earned("diversity", lists(1), by=by), strict=True):
            pairs = [float(alike(a, b)) for a, b in itertools.combinations(slate, 2)]
            assert value == pytest.approx(1 - np.mean(pairs) if pairs else 1.0)


def test_a_rule_counts_what_stands_beyond_it():
    brands = CATALOGUE.columns["material"]
    for slate, value in zip(lists(2), earned("rule", lists(2), column="material", most=2), strict=True):
        seen, kept = {}, 0
        for item in slate:
            seen[brands[item]] = seen.get(brands[item], 0) + 1
            kept += seen[brands[item]] <= 2
        assert value == pytest.approx(kept / len(slate))


def test_a_blank_value_is_no_group_and_a_first_word_may_stand_for_a_brand():
    shop = make_catalogue("abcd", ["Red soap", "red brush", "Blue soap", ""], {"brand": ["x", "", "", "x"]})
    assert values_of(shop, "first_word") == ("red", "red", "blue", "")
    counts = np.zeros(4)
    assert earned("rule", [(0, 1, 2), (0, 1, 3)], shop, counts, column="brand", most=1) == [1.0, pytest.approx(2 / 3)]
    assert earned("diversity", [(1, 2), (0, 1)], shop, counts, by="brand") == [1.0, 1.0]
    assert earned("diversity", [(0, 1)], shop, counts, by="first_word") == [0.0]


@pytest.mark.parametrize(
    ("name", "options", "wrong"),
    [
        ("tail", {"head": 1.0}, "head must be a share"),
        ("rule", {"column": "maker"}, "expected one of brand, colour, material, kind, first_word, got 'maker'"),
        ("rule", {"column": "brand", "most": 0}, "most must be"),
        ("diversity", {"by": "maker"}, "got 'maker'"),
    ],
)
def test_options_out_of_range_are_told(name, options, wrong):
    with pytest.raises(ValueError, match=wrong):
        earned(name, lists(), **options)


def test_a_completion_is_read_as_its_items_and_ranked_by_where_the_target_stands():
    items = items_of([item_word(row) for row in range(280)])
    assert slate_of(items, "item_3 item_279 nothing item_0") == (3, 279, 0) and slate_of(items, "") == ()
    assert ranks_of([(3, 279, 0), (1,), ()], [0, 1, 2], items=280).tolist() == [3, 1, 280]


def test_the_next_item_is_taught_at_any_place_of_a_list():
    task = Recommendation(writes="slate", template="{items} then", dummy_users=120, dummy_items=280, history_items=6)
    dataset = load_dataset(task)
    pairs = warm_start_pairs(task, dataset, 0, length=4)
    alone, begun = pairs[::2], pairs[1::2]
    beginnings = set()
    for row, (prompt, text), (longer, again) in zip(dataset.supervised, alone, begun, strict=True):
        assert prompt == row.prompt and text == again == item_word(row.columns["target_row"])
        beginning = longer.removeprefix(f"{prompt} ").split()
        beginnings.add(len(beginning))
        assert len({*beginning}) == len(beginning) and not {*beginning} & {*prompt.split(), text}
    assert beginnings == {1, 2, 3} and pairs != warm_start_pairs(task, dataset, 1, length=4)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slates") / "run"
    assert main([*SHORT, f"--run_dir={folder}"]) == 0
    return folder


def test_completions_are_ten_different_items_that_the_user_did_not_take(run):
    table = [line for path in sorted((run / "completions").glob("*")) for line in parquet.read_table(path).to_pylist()]
    assert len(table) == 3 * 8 * 4
    for line in table:
        listed = line["completion"].split()
        assert len({*listed}) == 10 and not {*listed} & {*line["prompt"].split()}
        assert all(word.startswith("item_") for word in listed)
    hits = [line["reward/hit"] for line in table]
    assert {*hits} <= {0.0, 1.0} and sum(hits) > 0
    for line in table:
        assert (line["reward/ndcg"] > 0) == (line["reward/hit"] == 1)
        assert 0 <= line["reward/tail"] <= 1 and 0 < line["reward/rule"] <= 1
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["truncated"] == 0 for line in metrics if "truncated" in line)


def test_the_rewards_of_a_list_are_measured_before_and_after_and_conditions_are_said(run, capsys):
    summary, text = json.loads((run / "summary.json").read_text()), (run / "train.log").read_text()
    assert "tail × 0.5 where hit ≥ 1" in text and "diversity × 0.25 where hit ≥ 1" in text
    for name in ("ndcg@10", "tail", "diversity", "rule"):
        assert 0 <= summary["evaluation"][name]["after"] <= 1
    assert summary["evaluation"]["ndcg@10"]["before"] > 0.02 and summary["evaluation"]["ndcg@10"]["oracle"] == 1
    assert evaluate_main(["--run", str(run), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["greedy"]
    for name in ("ndcg@10", "tail", "diversity"):
        assert again[name] == pytest.approx(summary["evaluation"][name]["after"])


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(run, tmp_path):
    halved = tmp_path / "halved"
    with stopped_after(halved, 2):
        main([*SHORT, f"--run_dir={halved}"])
    assert main([f"--run_dir={halved}", "--resume"]) == 0
    one, other = (
        [json.loads(line)["reward/total/mean"] for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (run, halved)
    )
    assert len(one) == 3 and one == other


def test_a_question_is_answered_by_the_list_that_the_policy_writes(run):
    dataset = load_dataset(Recommendation(writes="slate", template="{items} then", dummy_users=120, dummy_items=280))
    history = WORLD.sequences.users[0].items[:5]
    names = [item_word(row) for row in history]
    task = Recommendation(writes="slate", template="{items} then", history_items=6)
    prompt = history_prompt(task, [CATALOGUE.titles[row] for row in history], names)
    written = load_rewriter(run)(prompt).split()
    found = load_recommender(run)([CATALOGUE.ids[row] for row in history], 10)
    assert [item_word(dataset.catalogue.rows[item.item]) for item in found] == written
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load_recommender(run)(["i1", "i7"], 50)) == 10  # a list has no more


def test_filters_hold_and_what_is_unknown_is_skipped_with_a_note(run, tmp_path, capsys):
    ask = load_recommender(run)
    free = [item.item for item in ask(["i1", "i7"], 10)]
    assert not {*free} & {*(item.item for item in ask(["i1", "i7"], 10, exclude=free))}
    assert ask(["i1", "i7"], 10, exclude=free[1:])[0].item == free[0]
    allowed = [f"i{row}" for row in range(40)]
    found = ask(["i1", "i7"], 10, allow=allowed, at_most={"colour": 2, "material": 4})
    colours = [item.title.split()[1] for item in found]
    assert {item.item for item in found} <= {*allowed} - {"i1", "i7"} and max(map(colours.count, colours)) <= 2
    notes = []
    assert [item.item for item in ask(["i1", "nothing", "i7"], 10, note=notes.append)] == free
    assert len(notes) == 1 and notes[0].startswith("history: no item is called 'nothing'")
    (tmp_path / "out.txt").write_text("\n".join([*free[:2], "unknown item"]))
    words = ["--run", str(run), "--history", "i1 | i7", "--exclude", str(tmp_path / "out.txt"), "--at_most", "brand=3"]
    assert recommend_main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["items"]) == 3 and not {*free[:2]} & {item["item"] for item in answer["items"]}
    assert "exclude: no item is called 'unknown item'" in answer["note"] and "3 of 10 items" in answer["note"]


def test_without_a_history_the_most_popular_items_are_the_answer(run, capsys):
    assert recommend_main(["--run", str(run), "--history", "", "--k", "4", "--at_most", "brand=9"]) == 0
    printed = capsys.readouterr()
    known = taken_counts(load_dataset(Recommendation(dummy_users=120, dummy_items=280)).known, 280)
    scores = [float(line.split()[1]) for line in printed.out.splitlines() if line.strip()[0].isdigit()]
    assert scores == sorted(known.tolist(), reverse=True)[:4] and "these are the most popular" in printed.err


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--at_most", "brand"], "--at_most: expected COLUMN=N"),
        (["--at_most", "maker=2"], "at_most: expected one of brand"),
        (["--exclude", "absent.txt"], "--exclude: absent.txt: cannot be read"),
    ],
)
def test_filters_that_are_none_are_told(run, words, wrong, capsys):
    assert recommend_main(["--run", str(run), "--history", "i1", *words]) == 2
    assert wrong in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--task.template={history}"], "task.template: expected {items} in it: a list repeats no item"),
        (["--task.prior.together=1"], "task.prior: expected nothing"),
        (["--task.exclude_history=false"], "task.exclude_history: expected true"),
        (["--sampling.group=distinct"], "sampling.group: expected samples: lists are drawn one by one"),
        (["--data.max_prompt_tokens=271"], "sampling.max_new_tokens: expected at most 9: items less"),
        (["--data.form=rewrite"], "data.form: expected append"),
        (["--rewards=[{name: rule}]"], "column"),
        (["--rewards=[{name: rank_penalty}]"], "rewards.rank_penalty: expected"),
        (["--rewards=[{name: tail, options: {share: 1}}]"], "share"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(words, wrong, tmp_path, capsys):
    assert main([*SHORT, f"--run_dir={tmp_path / 'run'}", *words]) == 2
    assert wrong in capsys.readouterr().err
