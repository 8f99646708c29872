"""What a newcomer's files have wrong as a whole: one line that says what to do, not one each."""

import pytest

from grpo_jax.errors import UserError
from grpo_jax.tasks.recommendation.catalogue import read_catalogue, read_ratings, read_sequences

IDS = [f"P{n:03d}" for n in range(40)]
ITEMS = "item_id\ttitle\n" + "".join(f"{name}\tsoap of kind {name}\n" for name in IDS)
USERS = "".join(f"u{n} {' '.join(IDS[(3 * n + step) % 40] for step in range(6))}\n" for n in range(30))
SAID_OF_ALL = "40 of 40 items are not in the catalogue, such as 'P000' and 'P001'; its ids are "
BY_TITLE = "title\titem_id\n" + "".join(f"soap\t{name}\n" for name in IDS)
NUMBERED = "\titem_id\ttitle\n" + "".join(f"{row}\t{name}\tsoap\n" for row, name in enumerate(IDS))
KINDS = "kind\ttitle\n" + "".join(f"kind{row % 3}\tsoap\n" for row in range(40))
ONE_LINE_EACH = "".join(f"u{n % 5} {name}\n" for n, name in enumerate(IDS))


@pytest.mark.parametrize(
    ("items", "users", "said"),
    [
        (BY_TITLE, USERS, "items.tsv:1: the first column is the title, expected the item's id: put the column of ids"),
        (NUMBERED, USERS, SAID_OF_ALL + "'0' and '1', …: they stand in its column 'item_id', which must be the first"),
        (ITEMS.replace("P0", "P"), USERS, "…: write ids alike in both files: 'P000' here, 'P00' there"),
        (ITEMS, USERS.replace("P", "['P"), "…: write ids alike in both files: \"['P000\" here, 'P000' there"),
        (ITEMS.replace("P", "P "), USERS, "…: write its ids without white space, which separates items ('P 000')"),
        (ITEMS, "u0 soap of kind\nu1 kind of soap\n", "…: lines must hold the ids of items, not their titles"),
        (ITEMS.replace("P", "Q9"), USERS, "…: take the catalogue of these items, with their ids in its first column"),
        (ITEMS, USERS.replace(" ", ","), "30 lines hold no item, such as 'u0,P000,P001,P002,P003,P004,P005': a line"),
        (ITEMS, ONE_LINE_EACH, "40 lines hold one item, such as 'u0 P000': a line is user_id item1 … itemN, with white "
         "space between them; one line for each user, not for each item"),
        (ITEMS, "".join(f"u{n} P001\n" for n in range(9)), "; no user has two items"),
        (ITEMS, "user items\n" + USERS, "sequential.txt:1: user user: item items not in the catalogue (a header? this"),
        (ITEMS.replace("\t", ","), USERS, "it says ['item_id,title']: columns of a .tsv have tabs between them"),
        (ITEMS.partition("\n")[2], USERS, ": the first line must name the columns, the item's id first, and"),
        (ITEMS.replace("title", "Title"), USERS, "call 'Title' 'title', or say --data.columns.title Title"),
        (KINDS, USERS, "items.tsv: the first column must be the item's id, and has 3 different values in 40 lines"),
        (ITEMS.encode("utf-16"), USERS, "items.tsv: not UTF-8 text; save it as UTF-8"),
        ("", USERS, "items.tsv has no items: expected a line that names the columns id and title, and one for each"),
        (ITEMS, "", "sequential.txt has no users: expected a line for each, user_id item1 … itemN target"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_as_a_whole_is_one_hint(items, users, said, tmp_path):
    for name, content in {"items.tsv": items, "sequential.txt": users}.items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as error:
        read_sequences(tmp_path / "sequential.txt", read_catalogue(tmp_path / "items.tsv"))
    written = str(error.value).replace("bad data (1 place):\n  ", "")
    assert "\n" not in written and said in written
    assert len(written) < 420 + 2 * len(str(tmp_path))


def test_ratings_of_other_items_are_one_hint_too(tmp_path):
    (tmp_path / "items.tsv").write_text(ITEMS)
    lines = "".join(f"u{n % 5},{n},4,{n}\n" for n in range(1, 30))
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + lines)
    with pytest.raises(UserError, match=r"29 of 29 items .*: write ids alike in both files: '1' here, 'P001' there"):
        read_ratings(tmp_path / "ratings.csv", read_catalogue(tmp_path / "items.tsv"))


def test_windows_files_with_a_mark_of_their_bytes_are_read(tmp_path):
    for name, text in {"items.tsv": ITEMS, "sequential.txt": USERS}.items():
        (tmp_path / name).write_bytes(("\ufeff" + text).replace("\n", "\r\n").encode())
    catalogue = read_catalogue(tmp_path / "items.tsv")
    users = read_sequences(tmp_path / "sequential.txt", catalogue).users
    assert catalogue.ids == tuple(IDS) and [user.user for user in users] == [f"u{n}" for n in range(30)]
    assert users[0].items == tuple(range(6))
