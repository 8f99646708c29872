"""Recommendation data: formats, every kind of bad line, splits and prompts; the generated world."""

import itertools

import pytest

from grpo_jax.errors import UserError
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.prompts import read_prompt
from grpo_jax.tasks.recommendation import dataset as examples
from grpo_jax.tasks.recommendation.catalogue import (
    Catalogue,
    UserSequence,
    read_catalogue,
    read_events,
    read_sequences,
)
from grpo_jax.tasks.recommendation.dataset import (
    Dataset,
    Target,
    cut_title,
    history_prompt,
    last_split,
    load_dataset,
    sft_pairs,
    split_examples,
    together_titles,
)
from grpo_jax.tasks.recommendation.task import Recommendation

LETTERS = Catalogue(tuple("abcdefgh"), tuple(f"title {letter}" for letter in "ABCDEFGH"))


def write(tmp_path, name, content):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("items.tsv", 'item_id\tasin\ttitle\n1\tB7\tNail  Lacquer, 5" wide\n2\tB3\tÉponge\n'),
        ("items.csv", '\ufeffmovieId,title,asin\r\n1,"Nail Lacquer, 5"" wide",B7\r\n\r\n2,Éponge,B3\r\n'),
    ],
)
def test_a_catalogue_is_read_from_every_format(tmp_path, name, content):
    catalogue = read_catalogue(write(tmp_path, name, content))
    assert catalogue.ids == ("1", "2")
    assert catalogue.titles == ('Nail Lacquer, 5" wide', "Éponge")
    assert catalogue.rows == {"1": 0, "2": 1}
    assert len(catalogue) == 2


def test_all_bad_lines_of_a_catalogue_are_said_at_once(tmp_path):
    path = write(tmp_path, "i.tsv", "item_id\ttitle\n1\tOne\n2\n1\tAgain\n\tNobody\n4\tFour\n")
    with pytest.raises(
        UserError, match=r"i\.tsv: 3 bad lines: line 3: expected 2 fields as in the header, got 1; "
    ) as error:
        read_catalogue(path)
    assert str(error.value).endswith("line 4: item 1 occurs twice (first on line 2); and 1 more")


def test_what_is_no_file_of_its_kind_is_an_error(tmp_path):
    for name, content, said in (
        ("i.csv", 'id,title\n1,"One\n', "i.csv: line 2: not CSV"),
        ("i.json", "{}", "a catalogue is a .tsv or .csv file"),
    ):
        with pytest.raises(UserError, match=said):
            read_catalogue(write(tmp_path, name, content))
    for read in (read_catalogue, lambda path: read_sequences(path, LETTERS), lambda path: read_events(path, LETTERS)):
        with pytest.raises(UserError, match=r"nowhere.csv: cannot be read \(No such file"):
            read(tmp_path / "nowhere.csv")
    with pytest.raises(UserError, match="cannot be read"):
        read_sequences(tmp_path, LETTERS)


IDS = [f"P{n:03d}" for n in range(40)]
ITEMS = "item_id\ttitle\n" + "".join(f"{name}\tsoap of kind {name}\n" for name in IDS)
LINES = "".join(f"u{n} {' '.join(IDS[(3 * n + step) % 40] for step in range(6))}\n" for n in range(30))
BY_TITLE = "title\titem_id\n" + "".join(f"soap\t{name}\n" for name in IDS)
NUMBERED = "\titem_id\ttitle\n" + "".join(f"{IDS[-1 - n]}\t{name}\tsoap\n" for n, name in enumerate(IDS))


@pytest.mark.parametrize(
    ("items", "users", "message"),
    [
        (BY_TITLE, LINES, "items.tsv: the first column is the title: put the column of ids first"),
        (BY_TITLE.replace("title", "name"), LINES, "items.tsv: the first column is the title: put the column of ids"),
        (NUMBERED, LINES, "items.tsv: the first column has no name: put the column of ids first"),
        ("item_id\ttitle\titem_id\nx\ty\tz\n", LINES, "items.tsv: the header names the column 'item_id' twice"),
        (ITEMS.replace("P0", "P"), LINES, "40 of 40 items are not in the catalogue, such as 'P000'; its first id is "),
        (ITEMS, LINES.replace(" ", ","), "a line is user_id item1 … itemN, separated by white"),
        (ITEMS.replace("\t", ","), LINES, "['item_id,title']: rename it with --data.columns.title NAME; tabs sep"),
        (ITEMS.replace("title", "Title"), LINES, "the header has no column 'title', it says ['item_id', 'Title']"),
        (ITEMS.encode("utf-16"), LINES, "items.tsv: not UTF-8 text; save it as UTF-8"),
        ("", LINES, "items.tsv has no items: expected a line that names the columns id and title, and one for each"),
        (ITEMS, "", "sequential.txt has no user with at least 2 items"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_as_a_whole_is_one_line(items, users, message, tmp_path):
    for name, content in {"items.tsv": items, "sequential.txt": users}.items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as error:
        columns = {"title": "name"} if b"name\t" in (tmp_path / "items.tsv").read_bytes() else None
        read_sequences(tmp_path / "sequential.txt", read_catalogue(tmp_path / "items.tsv", columns=columns))
    assert "\n" not in str(error.value) and message in str(error.value)


def test_sequences_are_read(tmp_path):
    path = write(tmp_path, "s.txt", "u1 a b c\n\nu2\tc  a\r\nu3 a\nu4\nu5 b\n")
    found = read_sequences(path, LETTERS)
    assert found.users == (UserSequence("u1", (0, 1, 2)), UserSequence("u2", (2, 0)))
    assert found.notes == ("3 users with fewer than 2 items are left out",)


def test_a_repeated_item_counts_once_because_rankings_leave_out_the_history(tmp_path):
    found = read_sequences(write(tmp_path, "s.txt", "u1 a b a c b\nu2 d d d\n"), LETTERS)
    assert found.users == (UserSequence("u1", (0, 1, 2)),)
    assert found.notes == (
        "4 events repeat an item of the same user and are left out; the first counts",
        "1 users with fewer than 2 items are left out",
    )
    assert not any(target.item in target.history for part in last_split(found.users)[1:] for target in part)


def test_all_bad_lines_of_sequences_are_said_at_once(tmp_path):
    path = write(tmp_path, "s.txt", "u1 a b c\nu2 a x y\nu1 b c\nu5 a b\n")
    with pytest.raises(UserError, match=r"s\.txt: 2 bad lines: line 2: user u2: item x and 1 more not in the") as error:
        read_sequences(path, LETTERS)
    assert str(error.value).endswith("line 3: user u1 occurs twice (first on line 1)")
    with pytest.raises(UserError, match="no user with at least 2 items"):
        read_sequences(write(tmp_path, "empty.txt", "\n"), LETTERS)


RATINGS = """userId,movieId,rating,timestamp
7,c,5.0,30
7,a,4.0,10
9,a,3.5,5
7,d,4.5,10
7,b,1.0,20
9,b,5.0,4
8,a,5.0,1
"""


def test_events_are_sorted_by_time_and_ties_keep_the_order_of_the_file(tmp_path):
    path = write(tmp_path, "r.csv", RATINGS)
    sequences = read_events(path, LETTERS)
    assert sequences.users == (UserSequence("7", (0, 3, 1, 2)), UserSequence("9", (1, 0)))
    assert sequences.notes == ("1 users with fewer than 2 items are left out",)


SHOP = """customer,sku,bought at,note
ann,c,2026-03-01T09:00:00+02:00,
bob,a,2026-02-01,
ann,a,2026-03-01T07:30:00Z,
ann,c,2026-04-01T07:00:00Z,again
bob,b,2026-02-03 10:00:00,
eve,b,2026-02-04,
"""
NAMES = {"user_id": "customer", "item_id": "sku", "timestamp": "bought at"}


def test_purchases_of_a_shop_have_names_and_times_of_their_own(tmp_path):
    """What repeats, and who took one item, is counted and left out; two zones are one time."""
    path = write(tmp_path, "shop.csv", SHOP)
    found = read_events(path, LETTERS, columns=NAMES)
    assert [(user.user, user.items) for user in found.users] == [("ann", (2, 0)), ("bob", (0, 1))]
    assert found.notes == (
        "1 events repeat an item of the same user and are left out; the first counts",
        "1 users with fewer than 2 items are left out",
    )
    plainly = write(tmp_path, "plain.csv", SHOP.replace("customer,sku,bought at", "user_id,item_id,timestamp"))
    assert read_events(plainly, LETTERS) == found
    for changed, said in (
        ({}, "the header has no column 'user_id', it says .* --data.columns.user_id"),
        ({**NAMES, "timestamp": "when"}, "the header has no column 'when'"),
        ({**NAMES, "user_id": "sku"}, "the header has no column 'sku'"),
    ):
        with pytest.raises(UserError, match=said):
            read_events(path, LETTERS, columns=changed)
    with pytest.raises(UserError, match="no user with at least 2 items; 1 users"):
        read_events(write(tmp_path, "one.csv", "".join(SHOP.splitlines(True)[:2])), LETTERS, NAMES)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1,b,4,soon", "line 3: expected a timestamp that is a number or ISO 8601, got 'soon'"),
        ("1,z,4,3", "line 3: user 1: item z not in the catalogue"),
        ("1,c", "line 3: expected 4 fields as in the header, got 2"),
        (",d,1,1", "line 3: a blank user or a timestamp that is not finite"),
        ("1,e,1,nan", "line 3: a blank user or a timestamp that is not finite"),
        ("1,e,1,infinity", "line 3: a blank user or a timestamp that is not finite"),
    ],
)
def test_a_bad_rating_is_told_with_its_line(line, said, tmp_path):
    with pytest.raises(UserError) as error:
        read_events(write(tmp_path, "r.csv", f"userId,movieId,rating,timestamp\n1,a,4,1\n{line}\n"), LETTERS)
    assert str(error.value).endswith(f"r.csv: 1 bad line: {said}")


def test_a_template_lists_the_newest_titles():
    text = "Last was {last}. Before {odd}: {history}!"
    task = Recommendation(template=text, history_items=2, title_characters=0, separator=" | ")
    assert history_prompt(task, ["one", "two", "three"]) == "Last was three. Before {odd}: two | three!"
    assert history_prompt(Recommendation(), ["", "b"]) == f"{examples.NO_TITLE}\nb"
    assert history_prompt(Recommendation(), ["{last}", "{history}"]) == "{last}\n{history}"
    lines = Recommendation(template=" {last}\n")  # a YAML block ends with a line break; recommend reads prompts without
    assert history_prompt(lines, ["one"]) == read_prompt(" one\n", (), None).prompt == "one"
    assert history_prompt(Recommendation(template="{history}; {last}; {history}"), ["one"]) == "one; one; one"
    cuts = {16: "OPI Nail Lacquer", 10: "OPI Nail", 5: "OPI", 2: "OP"}  # between words where that leaves one
    assert {n: cut_title("OPI Nail Lacquer", n) for n in cuts} == cuts


USERS = [UserSequence("long", (0, 1, 2, 3, 4)), UserSequence("three", (5, 6, 7)), UserSequence("two", (1, 2))]


def shape(rows):
    return {(row.columns["user"], row.columns["history"], row.columns["target_row"]) for row in rows}


def test_split_examples_trains_on_what_precedes_the_held_out_items():
    split = split_examples(last_split(USERS), LETTERS, Recommendation(history_items=2))
    assert shape(split.train) == {("long", (0,), 1), ("long", (0, 1), 2)}
    assert shape(split.validation) == {("long", (0, 1, 2), 3), ("three", (5,), 6)}
    assert shape(split.test) == {("long", (0, 1, 2, 3), 4), ("three", (5, 6), 7), ("two", (1,), 2)}
    row = next(row for row in split.test if row.columns["user"] == "long")
    assert row.prompt == "title C\ntitle D"
    assert {name: row.columns[name] for name in ("target", "target_title", "last_title")} == {
        "target": "e",
        "target_title": "title E",
        "last_title": "title D",
    }
    ids = [row.id for part in split for row in part]
    assert len(set(ids)) == len(ids)


def test_users_with_nothing_to_train_on_are_refused():
    with pytest.raises(UserError, match="no user has four items"):
        split_examples(last_split(USERS[1:]), LETTERS, Recommendation())


def test_ids_do_not_depend_on_users_that_come_later_and_the_test_order_not_on_the_file():
    users = [UserSequence(f"u{i}", (0, 1, 2, i % 5 + 3)) for i in range(40)]
    whole, head = (split_examples(last_split(part), LETTERS, Recommendation()) for part in (users, users[:20]))
    by_id = {row.id: row for part in whole for row in part}
    assert all(by_id[row.id] == row for part in head for row in part)
    backwards = split_examples(last_split(users[::-1]), LETTERS, Recommendation())
    names = [row.columns["user"] for row in whole.test]
    assert [row.columns["user"] for row in backwards.test] == names != [user.user for user in users]


def test_a_policy_that_ranks_is_taught_next_items():
    blank = Catalogue(tuple("abcd"), ("one two", "two three four", "", "five"))
    task = Recommendation(separator="/", writes="title")
    split = split_examples(last_split([UserSequence("u", (0, 1, 2, 3, 0, 1))]), blank, task)
    assert sft_pairs(task, Dataset(blank, (), (), split, ()), 0) == [
        ("one two", "two three four"),
        (f"one two/two three four/{examples.NO_TITLE}", "five"),
    ]


def test_pairs_of_what_is_taken_together_with_the_last_item():
    """c is taken with a by two of three users, b with a by one; what the history has already is passed over."""
    letters = Catalogue(tuple("abcd"), ("an a", "a bee", "the sea of c", "dee"))
    users = [UserSequence(name, items) for name, items in (("u", (0, 2)), ("v", (0, 2, 1)), ("w", (3,)))]

    def row(*history, user="x"):
        return Row(0, str(history), examples.example_columns(Target(user, history, 3, 0), letters))

    rows = [row(0), row(2, 0), row(0, 2, 1), row(3), row(1, 2)]
    assert together_titles(rows, letters, users) == ["the sea of c", "a bee", "", "", "an a"]


def test_a_user_is_not_counted_in_what_they_are_taught():
    """Only y took c and d: y is taught a after c, and nothing after d; others are taught what both of them show."""
    letters = Catalogue(tuple("abcd"), ("an a", "a bee", "the sea of c", "dee"))
    users = [UserSequence("u", (0, 1)), UserSequence("v", (0, 2)), UserSequence("w", (0, 1)), UserSequence("y", (2, 3))]
    rows = [Row(0, "", examples.example_columns(Target(name, (0,), 3, 0), letters)) for name in ("u", "v", "w", "x")]
    assert together_titles(rows, letters, users) == ["a bee", "a bee", "a bee", "a bee"]
    alone = [Row(0, "", examples.example_columns(Target("y", (last,), 3, 0), letters)) for last in (2, 3)]
    assert together_titles(alone, letters, users) == ["an a", ""]


def test_what_a_rule_does_is_said(tmp_path):
    write(tmp_path, "items.csv", "id,title\na,one\nb,one\nc,  \nd,\ne,ONE!\nf,?!\n")
    write(
        tmp_path, "r.csv", "userId,movieId,rating,timestamp\n" + "".join(f"1,{c},3,{i}\n" for i, c in enumerate("abcd"))
    )
    fields = {"source": str(tmp_path / "r.csv"), "catalogue": str(tmp_path / "items.csv")}
    notes = load_dataset(Recommendation(**fields)).notes
    assert notes == (
        "3 items without a word in the title are kept; no query finds them",
        "2 items share another's title; no query can tell them apart",
    )


def test_without_noise_targets_follow_the_rules():
    catalogue, sequences = examples.make_world(users=100, fickle=0.3, noise=0.0)
    votes = 0
    for user in sequences.users:
        words = [catalogue.titles[item].split() for item in user.items]
        brands, colours, materials, kinds = zip(*words, strict=True)
        assert len(set(materials)) == 1
        for names, wheel in ((colours, examples.COLOURS), (kinds, examples.KINDS)):
            steps = [(wheel.index(b) - wheel.index(a)) % len(wheel) for a, b in itertools.pairwise(names)]
            assert steps == [1] * 7
        history = list(brands[:-1])
        votes += max(history, key=history.count) == brands[-1]
    assert votes >= 90


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_no_title_repeats_and_no_prompt_holds_the_target(noise):
    catalogue, sequences = examples.make_world(users=200, length=20, noise=noise, seed=4)
    for user in sequences.users:
        assert len(set(user.items)) == len(user.items)
    task = Recommendation(history_items=19, separator=" , ")
    for part in split_examples(last_split(sequences.users), catalogue, task):
        assert not any(row.columns["target_title"] in row.prompt for row in part)


def test_the_default_task_is_this_world():
    dataset = load_dataset(Recommendation(dummy_users=50))
    assert [len(part) for part in dataset.prompts] == [50 * 5, 50, 50]
    assert len(dataset.catalogue) == 2240 and dataset.notes == ()
    assert len(dataset.prompts.test[0].prompt.splitlines()) == 4
