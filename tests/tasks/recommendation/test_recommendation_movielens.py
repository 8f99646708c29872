"""MovieLens as it is published, where it lies beside the repository: ratings become histories in time order."""

import csv
from pathlib import Path

import pytest

from grpo_jax.tasks.recommendation.dataset import load_dataset
from grpo_jax.tasks.recommendation.task import Recommendation

FOLDER = Path(__file__).parents[3].parent / "shared" / "data" / "ml-latest-small"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"needs {FOLDER}")


def table(name):
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_ratings_as_published_are_histories_in_the_order_of_time():
    source, catalogue = (str(FOLDER / name) for name in ("ratings.csv", "movies.csv"))
    task = Recommendation(
        source=source, catalogue=catalogue, minimum_rating=4, minimum_items=5, title_characters=50, separator=" | "
    )
    dataset = load_dataset(task)
    titles = {row["movieId"]: row["title"] for row in table("movies.csv")}
    rated: dict[str, list] = {}
    for row in table("ratings.csv"):
        if float(row["rating"]) >= 4:
            rated.setdefault(row["userId"], []).append((int(row["timestamp"]), row["movieId"]))
    expected = {
        user: [movie for _, movie in sorted(events, key=lambda event: event[0])]
        for user, events in rated.items()
        if len(events) >= 5
    }
    catalogue = dataset.catalogue
    assert dict(zip(catalogue.ids, catalogue.titles, strict=True)) == {
        movie: " ".join(title.split()) for movie, title in titles.items()
    }
    assert {user.user: [catalogue.ids[row] for row in user.items] for user in dataset.users} == expected
    assert len(dataset.prompts.test) == len(expected) > 500
    example = dataset.prompts.test[0]
    history = expected[example.columns["user"]]
    assert example.columns["target"] == history[-1]
    assert example.prompt.split(" | ")[-1] in titles[history[-2]]
    assert any("below 4 do not count" in note for note in dataset.notes)
