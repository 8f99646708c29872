"""Semantic ids: the codes of titles, their file, the words that a policy gets, and a run that reads and writes them."""

import json

import numpy as np
import pytest
import yaml
from support.shop_files import write_shop
from support.tiny_models import causal_lm

from grpo_jax.core.trie import depth_of
from grpo_jax.errors import UserError
from grpo_jax.models import hf
from grpo_jax.recommend import load_recommender
from grpo_jax.sampling.samplers import choices_trie
from grpo_jax.tasks.recommendation.catalogue import items_of, make_catalogue, plain
from grpo_jax.tasks.recommendation.dummy import make_world
from grpo_jax.tasks.recommendation.semantic_ids import main as ids_main
from grpo_jax.tasks.recommendation.semantic_ids import read_ids, residual_codes, title_codes, words_of, write_ids
from grpo_jax.train import main

WORLD = make_world(users=120, items=280, length=8, fickle=0.1, noise=0.02, seed=0)
RUN = {
    "task": {
        "kind": "recommendation",
        "source": "dummy",
        "dummy_users": 120,
        "dummy_items": 280,
        "writes": "ids",
        "template": "{items}",
        "listed": 20,
    },
    "policy": {"path": "new", "new": {"width": 32, "layers": 1, "heads": 2, "window": 24}, "remat": "none"},
    "warm_start": {"steps": 60, "batch": 32, "learning_rate": 1e-2},
    "sampling": {"group_size": 4, "max_new_tokens": 5},
    "data": {"max_prompt_tokens": 20},
    "training": {"prompts_per_batch": 8, "max_steps": 1, "save_every": 0},
    "rewards": [{"name": "ndcg"}],
    "evaluation": {"prompts": 24, "validation_prompts": 8, "every": 0, "sampled": False},
}


def test_codes_are_the_clusters_of_what_the_level_before_left():
    """Two places far apart, two corners of each, everything twice: codes are place, corner and which of the two."""
    vectors = np.array([[-9, 1], [-9, -1], [9, 1], [9, -1]] * 2, np.float32)
    found = residual_codes(vectors, levels=2, size=2, seed=0)
    place, corner, which = found.codes.T
    np.testing.assert_array_equal(place == place[0], vectors[:, 0] == -9)
    np.testing.assert_array_equal(corner == corner[0], vectors[:, 1] == 1)
    assert which.tolist() == [0] * 4 + [1] * 4 and found.sizes == (2, 2, 2) and found.shared == 1.0
    assert found.left == pytest.approx((1 / 82, 0), abs=1e-6)
    alone = residual_codes(vectors[:5], levels=1, size=4, seed=0)
    assert alone.codes[:, 1].tolist() == [0, 0, 0, 0, 1] and alone.shared == pytest.approx(2 / 5)


def test_codes_differ_return_with_the_seed_and_are_shared_by_what_is_alike():
    titles = WORLD.catalogue.titles
    found, again = (title_codes(titles, levels=2, size=8, seed=3) for _ in range(2))
    np.testing.assert_array_equal(found.codes, again.codes)
    assert len(np.unique(found.codes, axis=0)) == 280 and found.sizes[:2] == (8, 8) and 0 < found.shared < 1
    assert 1 > found.left[0] > found.left[1] > 0
    # Of four words those of one item in 40 are another's but for the colour; a code stands for some 35 items.
    same = found.codes[:, None, 0] == found.codes[None, :, 0]
    sets = [set(title.split()) for title in titles]
    alike = np.array([[len(one & other) == 3 for other in sets] for one in sets])
    assert same[alike].mean() > 2 * same[~alike & ~np.eye(280, dtype=bool)].mean()


def test_equal_vectors_and_zeros_have_ids_too():
    vectors = np.zeros((5, 3), np.float32)
    found = residual_codes(vectors, levels=2, size=4, seed=0)
    assert found.codes.tolist() == [[0, 0, place] for place in range(5)] and found.left == (0.0, 0.0)


def test_a_file_keeps_the_words_in_any_order_of_its_lines(tmp_path):
    catalogue = make_catalogue(["x", "y 1"], ["Red soap", "Blue soap"])
    words = words_of(np.array([[0, 12, 0], [0, 3, 1]]))
    assert words == ("<a_0> <b_12> <c_0>", "<a_0> <b_3> <c_1>")
    write_ids(tmp_path / "ids.tsv", catalogue.ids, words, made="by hand")
    first, header, *lines = (tmp_path / "ids.tsv").read_text().splitlines()
    assert (first, header) == ("# by hand", "item_id\twords") and read_ids(tmp_path / "ids.tsv", catalogue) == words
    (tmp_path / "other.tsv").write_text("\n".join([header, *lines[::-1]]))
    assert read_ids(tmp_path / "other.tsv", catalogue) == words
    with pytest.raises(UserError, match=r"item 'a\\tb': expected an id"):
        write_ids(tmp_path / "ids.tsv", ["a\tb"], ["w"], made="")


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (["x\t<a_1>"], "lacks 1 of the catalogue's 2 items, the first is y"),
        (["x\t<a_1>", "x\t<a_2>", "y\t<a_3>"], "ids.tsv:4: item x occurs twice"),
        (["x\t<a_1>", "y\t<a_1>"], "ids.tsv:4: item y has the words of item x"),
        (["x\t<a_1>", "z\t<a_2>", "y\t<a_3>"], "ids.tsv:4: item z is not in the catalogue"),
        (["x\t<>", "y\t<a_1>"], "ids.tsv:3: item x has no words"),
        (["x", "y\t<a_1>"], "ids.tsv:3: expected 2 fields"),
        (None, "the header has no column 'words'"),
    ],
)
def test_a_bad_file_is_named_with_its_line(lines, wrong, tmp_path):
    header = ["item_id\ttitle", "x\tsoap"] if lines is None else ["item_id\twords", *lines]
    (tmp_path / "ids.tsv").write_text("\n".join(["# made", *header]))
    with pytest.raises(UserError) as error:
        read_ids(tmp_path / "ids.tsv", make_catalogue(["x", "y"], ["Red soap", "Blue soap"]))
    assert wrong in str(error.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ids by the command, and a policy that got them as words of its own."""
    place = tmp_path_factory.mktemp("ids")
    write_shop(place, WORLD)
    source = causal_lm(place / "source")
    words = [f"--catalogue={place / 'items.tsv'}", f"--out={place / 'ids.tsv'}", "--size=8"]
    assert ids_main([*words, f"--policy={source}", f"--policy_out={place / 'policy'}"]) == 0
    return place


def test_the_command_writes_what_the_function_finds(folder, capsys, tmp_path):
    expected = words_of(title_codes(WORLD.catalogue.titles, levels=3, size=8, seed=0).codes)
    assert read_ids(folder / "ids.tsv", WORLD.catalogue) == expected
    assert (folder / "ids.tsv").read_text().startswith("# encoder tfidf, levels 3, size 8, seed 0\n")
    given = [f"--catalogue={folder / 'items.tsv'}", f"--out={tmp_path / 'ids.tsv'}"]
    for words, wrong in (
        (["--levels=0"], "--levels: expected a number from 1 to 25, got 0"),
        (["--size=1"], "--size: expected a number >= 2"),
        (["--policy=somewhere"], "--policy and --policy_out: expected both"),
        (["--out=no/such/folder.tsv"], "cannot write no/such/folder.tsv"),
        ([f"--policy={folder / 'policy'}", f"--policy_out={tmp_path / 'p'}", "--size=8"], "has these words already"),
    ):
        assert ids_main([*given, *words]) == 2
        assert wrong in capsys.readouterr().err


def test_a_word_is_one_token_that_starts_as_the_mean_of_its_titles(folder):
    names = read_ids(folder / "ids.tsv", WORLD.catalogue)
    before, after = hf.load_folder(folder / "source"), hf.load_folder(folder / "policy")
    tokenizer, items = after.tokenizer, items_of(names)
    for gap in (False, True):  # behind a chat template's mark, and behind text
        assert depth_of(choices_trie(names, after, gap=gap, most=5)) == 5
    ids = tokenizer(f"Bought: {names[0]} {names[5]}", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[-8:] == f"{names[0]} {names[5]}".split()
    written = [tokenizer.decode(tokenizer(name, add_special_tokens=False)["input_ids"]) for name in names]
    assert [items.row_of(text) for text in written] == list(range(280))

    word = names[0].split()[1]
    titles = [title for title, name in zip(WORLD.catalogue.titles, names, strict=True) if word in name.split()]
    (token,) = tokenizer(word, add_special_tokens=False)["input_ids"]
    for table in ("embed_tokens", "lm_head"):
        old, new = (np.asarray(loaded.params[table]) for loaded in (before, after))
        said = [old[before.tokenizer(title, add_special_tokens=False)["input_ids"]].mean(0) for title in titles]
        np.testing.assert_allclose(new[token], np.mean(said, 0), rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(new[: len(before.tokenizer)], old[: len(before.tokenizer)])


@pytest.fixture(scope="module")
def run(folder):
    config = RUN | {"task": RUN["task"] | {"semantic_ids": str(folder / "ids.tsv")}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert main([f"--config={folder / 'config.yaml'}", f"--run_dir={folder / 'run'}"]) == 0
    return folder / "run"


def test_a_policy_of_ids_learns_rules_that_hold_for_items_of_other_brands(run):
    """Colour, kind and material go on by rules that the codes show; a word for each item would have to learn 280."""
    summary = json.loads((run / "summary.json").read_text())
    popular = next(line["NDCG@10"]["mean"] for line in summary["table"] if line["method"] == "popularity")
    assert summary["evaluation"]["ndcg@10"]["before"] > 0.4 > popular
    assert summary["evaluation"]["ndcg@10"]["oracle"] == 1


def test_it_recommends_and_its_vocabulary_is_the_words_of_the_ids(run, folder):
    names = read_ids(folder / "ids.tsv", WORLD.catalogue)
    words = {word for name in names for word in plain(name).split()}
    vocabulary = hf.read_folder(run / "policy_start").tokenizer.get_vocab()
    assert words < {*vocabulary} and len(vocabulary) == len(words) + 4  # marks
    found = load_recommender(run)([WORLD.catalogue.titles[3], "i7"], 5)
    assert len(found) == 5 and not {"i3", "i7"} & {item.item for item in found}


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--task.semantic_ids=null"], "semantic_ids"),
        (["--task.writes=item"], "semantic_ids"),
        (["--task.semantic_ids=absent.tsv"], "absent.tsv does not exist"),
        (["--task.dummy_items=560"], "lacks 280 of the catalogue's 560 items"),
        (["--sampling.max_new_tokens=4"], "sampling.max_new_tokens: expected at least 5"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(words, wrong, folder, tmp_path, capsys):
    config = RUN | {"task": RUN["task"] | {"semantic_ids": str(folder / "ids.tsv")}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert main([f"--config={tmp_path / 'config.yaml'}", f"--run_dir={tmp_path / 'run'}", *words]) == 2
    assert wrong in capsys.readouterr().err
