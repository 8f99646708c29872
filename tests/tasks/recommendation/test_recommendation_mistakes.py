"""A file that is wrong as a whole is one line."""

import pytest

from grpo_jax.errors import UserError
from grpo_jax.tasks.recommendation.catalogue import read_catalogue, read_events, read_sequences

IDS = [f"P{n:03d}" for n in range(40)]
ITEMS = "item_id\ttitle\n" + "".join(f"{name}\tsoap of kind {name}\n" for name in IDS)
USERS = "".join(f"u{n} {' '.join(IDS[(3 * n + step) % 40] for step in range(6))}\n" for n in range(30))
BY_TITLE = "title\titem_id\n" + "".join(f"soap\t{name}\n" for name in IDS)


@pytest.mark.parametrize(
    ("items", "users", "message"),
    [
        (BY_TITLE, USERS, "items.tsv:1: the first column is the title, expected the item's id: put the column of ids"),
        (ITEMS.replace("P0", "P"), USERS, "40 of 40 items are not in the catalogue, such as 'P000'; its first id is "),
        (ITEMS, USERS.replace(" ", ","), "no user has two items; a line is user_id item1 … itemN, separated by white"),
        (ITEMS.replace("\t", ","), USERS, "['item_id,title']: rename it with --data.columns.title NAME; a .tsv sep"),
        (ITEMS.replace("title", "Title"), USERS, "the header has no column 'title', it says ['item_id', 'Title']"),
        (ITEMS.encode("utf-16"), USERS, "items.tsv: not UTF-8 text; save it as UTF-8"),
        ("", USERS, "items.tsv has no items: expected a line that names the columns id and title, and one for each"),
        (ITEMS, "", "sequential.txt: no user has two items"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_as_a_whole_is_one_line(items, users, message, tmp_path):
    for name, content in {"items.tsv": items, "sequential.txt": users}.items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as error:
        read_sequences(tmp_path / "sequential.txt", read_catalogue(tmp_path / "items.tsv"))
    written = str(error.value).replace("bad data (1 place):\n  ", "")
    assert "\n" not in written and message in written


def test_ratings_of_other_items_are_one_line_too(tmp_path):
    (tmp_path / "items.tsv").write_text(ITEMS)
    lines = "".join(f"u{n % 5},{n},4,{n}\n" for n in range(1, 30))
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + lines)
    with pytest.raises(UserError, match=r"29 of 29 items are not in the catalogue, such as '1'; its first id is"):
        read_events(tmp_path / "ratings.csv", read_catalogue(tmp_path / "items.tsv"))


def test_windows_files_with_a_byte_order_mark_are_read(tmp_path):
    for name, text in {"items.tsv": ITEMS, "sequential.txt": USERS}.items():
        (tmp_path / name).write_bytes(("\ufeff" + text).replace("\n", "\r\n").encode())
    catalogue = read_catalogue(tmp_path / "items.tsv")
    users = read_sequences(tmp_path / "sequential.txt", catalogue).users
    assert catalogue.ids == tuple(IDS) and [user.user for user in users] == [f"u{n}" for n in range(30)]
    assert users[0].items == tuple(range(6))
