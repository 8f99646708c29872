"""What the page holds of a run's completions: all that fits, evenly spread where it does not, and a note of it."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from grpo_jax.reports.completions import read_completions, spread
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.pictures import File, pictures_column
from grpo_jax.runs.directory import RunDirectory


def write(folder, step, prompts, group=2, length=20, **more):
    """An iteration of completions that are all different; gives its columns."""
    count = len(prompts) * group
    columns = {
        "prompt": [prompt for prompt in prompts for _ in range(group)],
        "completion": [f"{step} {place} ".ljust(length, "é") for place in range(count)],
        "reward/x": np.linspace(-1, 1, count) * step,
        "truncated": np.arange(count) % 2 == 1,
    } | more
    RunDirectory(folder).write_completions(step, columns)
    return columns


def read_back(data):
    """The columns as a reader of the page sees them."""
    return {
        column["name"]: [
            column["words"][value] if "words" in column and value is not None else value for value in column["values"]
        ]
        for column in data["columns"]
    }


def test_what_was_written_is_in_the_page(tmp_path):
    tmp_path = tmp_path / "rate=3"  # which is no column
    tmp_path.mkdir()
    written = [write(tmp_path, step, ["a </script>", "b\n'\"&"]) for step in (1, 2, 10)]
    logged = read_completions(tmp_path / "completions")
    assert logged.note == "All 12 completions of 3 iterations."
    came = read_back(json.loads(json.dumps(logged.data)))
    assert came["step"] == [1] * 4 + [2] * 4 + [10] * 4
    for name in ("prompt", "completion"):
        assert came[name] == [value for columns in written for value in columns[name]]
    np.testing.assert_allclose(came["reward/x"], np.concatenate([c["reward/x"] for c in written]), rtol=1e-4)
    assert came["truncated"] == [0, 1] * 6
    assert [column["kind"] for column in logged.data["columns"]] == ["number", "text", "text", "number", "flag"]
    assert logged.data["columns"][1]["words"] == ["a </script>", "b\n'\"&"]  # each once


def test_columns_without_a_value_and_what_is_the_same_are_left_out(tmp_path):
    texts = [" said  so", "other"]
    write(tmp_path, 1, ["a"], completion=texts, text=["said so", "OTHER"], answer=[None, None], gone=[float("nan")] * 2)
    write(tmp_path, 2, ["a"], kept_prompt=[True, False])  # a column that the first has not
    came = read_back(read_completions(tmp_path / "completions").data)
    assert came["text"] == [None, "OTHER", None, None] and came["kept_prompt"] == [None, None, 1, 0]
    assert "answer" not in came and "gone" not in came


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 64, 100])
def test_each_beginning_is_spread_evenly(count):
    order = spread(count)
    assert sorted(order) == list(range(count))
    for length in range(2, count):
        gaps = np.diff(sorted(order[:length]))
        assert order[:2] == [0, count - 1] and gaps.max() <= 4 * -(-count // length)


def test_what_does_not_fit_is_left_out_and_said(tmp_path):
    for step in range(1, 41):
        write(tmp_path, step, ["a", "b"], length=200)
    logged = read_completions(tmp_path / "completions", megabytes=0.03)
    steps = sorted(set(read_back(logged.data)["step"]))
    size = len(json.dumps(logged.data, ensure_ascii=False).encode())
    assert steps[0] == 1 and steps[-1] == 40 and 5 < len(steps) < 20 and 15_000 < size < 33_000
    assert logged.note == (
        f"{4 * len(steps)} completions of {len(steps)} iterations of 40, evenly spread: what fits into 0.03 MB. "
        "All are in completions/."
    )


def test_of_a_large_iteration_the_first_groups_are_there_whole(tmp_path):
    for step in range(1, 21):
        write(tmp_path, step, [f"prompt {place}" for place in range(30)], group=3, length=300)
    logged = read_completions(tmp_path / "completions", megabytes=0.1)
    came = read_back(logged.data)
    of_first = [prompt for step, prompt in zip(came["step"], came["prompt"], strict=True) if step == 1]
    assert of_first == [f"prompt {place}" for place in range(len(of_first) // 3) for _ in range(3)]
    assert 3 < len(of_first) < 90 and len(set(came["step"])) >= 8
    assert "of an iteration that has too many, those of its first prompts" in logged.note


def test_long_texts_are_cut_and_damaged_files_named(tmp_path):
    write(tmp_path, 1, ["a"], completion=["x" * 50_000, "short"])
    (tmp_path / "completions" / "step_000002.parquet").write_bytes(b"PAR1")
    logged = read_completions(tmp_path / "completions")
    assert read_back(logged.data)["completion"] == ["x" * 20_000 + "…", "short"]
    assert logged.note == (
        "2 completions of 1 iteration. Texts are cut after 20000 characters. Could not be read: step_000002.parquet."
    )
    assert read_completions(tmp_path / "nothing") is None


def test_pictures_of_prompts_stand_there_once(tmp_path):
    rng = np.random.default_rng(0)
    small, large = (Image.fromarray(rng.integers(0, 255, (size, size, 3), np.uint8)) for size in (8, 300))
    large.save(tmp_path / "large.png")
    (tmp_path / "broken.png").write_bytes(b"nothing")
    files = [File(tmp_path / name, name) for name in ("large.png", "broken.png")]
    rows = [Row(0, "a", {}, (small,)), Row(1, "b", {}, tuple(files)), Row(2, "c", {})]
    write(tmp_path, 1, ["a", "b", "c"], **pictures_column([row for row in rows for _ in range(2)]))
    data = read_completions(tmp_path / "completions").data
    assert data["pictures"] == [[0], [0], [1, 2], [1, 2], [], []] and data["images"][2] == "broken.png"
    sizes = [Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2]))).size for image in data["images"][:2]]
    assert sizes == [(8, 8), (128, 128)]


def test_groups_of_one_prompt_are_told_apart_by_their_pictures(tmp_path):
    pictures = [Image.new("RGB", (8, 8), (place * 9, 0, 0)) for place in range(20)]
    rows = [Row(place, "draw it", {}, (picture,)) for place, picture in enumerate(pictures) for _ in range(3)]
    for step in (1, 2):
        write(tmp_path, step, ["draw it"] * 20, group=3, length=300, **pictures_column(rows))
    data = read_completions(tmp_path / "completions", megabytes=0.03).data
    shown = [place for (place,) in data["pictures"]]
    assert 3 < len(shown) < 60 and all(shown.count(place) % 3 == 0 for place in shown)
