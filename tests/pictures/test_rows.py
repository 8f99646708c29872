"""Rows with pictures in all supported forms: reading, checks, splits, rewards."""

import base64
import dataclasses
import io
import json
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from support.rollouts import single_turns
from support.tiny_models import VISION_TOKENS, chat_tokenizer
from support.vision.folders import picture, write_rows

from grpo_jax.config.run import make_config
from grpo_jax.config.sections import DataSection
from grpo_jax.errors import UserError
from grpo_jax.models.hf.chat import Message
from grpo_jax.models.hf.image_processor import PictureSettings
from grpo_jax.predict import make_rewriter
from grpo_jax.rollout import pictures as sources
from grpo_jax.rollout.data import PromptSet, data_identity
from grpo_jax.rollout.encoding import ImageProcessor, make_encode
from grpo_jax.rollout.env import as_uint8
from grpo_jax.rollout.pictures import File, open_picture, read_rgb, size_of
from grpo_jax.rollout.prompts import load_prompts, make_prompt_set
from grpo_jax.rollout.rewards import Score
from grpo_jax.runs.directory import RunDirectory
from grpo_jax.runs.python_input import PythonInput, from_python, keep_prompts, kept_prompts
from grpo_jax.runs.session import require_same_task

SEEN = picture(7)


def bytes_of(image=SEEN, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def text_of(image=SEEN, kind="PNG"):
    return base64.b64encode(bytes_of(image, kind)).decode()


def pixels(source):
    return np.asarray(read_rgb(source)).tolist()


def in_memory():
    import torch

    array = np.asarray(SEEN)
    return {
        "bytes": bytes_of(),
        "record": {"bytes": bytes_of(), "path": "gone.png"},
        "pillow": SEEN,
        "array": array,
        "floats": array.astype(np.float32) / 255,
        "torch": torch.tensor(array).permute(2, 0, 1) / 255,
        "torch uint8": torch.tensor(array).permute(2, 0, 1),
    }


def in_json(folder):
    SEEN.save(folder / "seen.png")
    return {
        "relative": "seen.png",
        "absolute": str(folder / "seen.png"),
        "base64": text_of(),
        "url": f"data:image/png;base64,{text_of()}",
        "record": {"bytes": None, "path": "seen.png"},
        "file": f"file://{folder / 'seen.png'}",
    }


def test_every_form_of_a_line_is_the_same_picture(tmp_path, monkeypatch):
    monkeypatch.chdir("/")  # paths are relative to the file, not to where the command runs
    forms = in_json(tmp_path).values()
    lines = [{"prompt": "what?", "image": form, "answer": 3} for form in forms]
    lines += [{"prompt": "what?", "images": [form], "answer": 3} for form in forms]
    rows = load_prompts(write_rows(tmp_path, lines), held_out=0).train
    assert len(rows) == 12
    for row in rows:
        assert row.columns == {"answer": 3} and row.prompt == "what?"
        assert [pixels(source) for source in row.pictures] == [pixels(SEEN)] and size_of(row.pictures[0]) == (12, 20)


@pytest.mark.parametrize("name", list(in_memory()))
def test_every_form_in_memory_is_the_same_picture(name):
    (row,) = make_prompt_set([{"prompt": "what?", "image": in_memory()[name]}]).train
    assert pixels(row.pictures[0]) == pixels(SEEN) and size_of(row.pictures[0]) == (12, 20)
    assert as_uint8(in_memory()[name]).tolist() == pixels(SEEN)  # what an environment answers with


def test_jpeg_in_base64_begins_like_a_path():
    assert text_of(kind="JPEG").startswith("/9j/")
    (row,) = make_prompt_set([{"prompt": "what?", "image": text_of(kind="JPEG")}]).train
    assert isinstance(row.pictures[0], bytes)


@pytest.mark.parametrize("stored", ["records", "bytes", "lists", "paths"])
def test_parquet_files(stored, tmp_path):
    SEEN.save(tmp_path / "seen.png")
    record = {"bytes": bytes_of(), "path": None}
    column = {
        "records": [record, None, {"bytes": None, "path": "seen.png"}],
        "bytes": [bytes_of(), None, bytes_of()],
        "lists": [[record, record], [], [record]],
        "paths": ["seen.png", None, "seen.png"],
    }[stored]
    table = pyarrow.table(
        {"prompt": ["a", "b", "c"], "images" if stored == "lists" else "image": column, "n": [1, 2, 3]}
    )
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    rows = load_prompts(tmp_path / "p.parquet", held_out=0).train
    assert [len(row.pictures) for row in rows] == ([2, 0, 1] if stored == "lists" else [1, 0, 1])
    assert [row.columns for row in rows] == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert all(pixels(source) == pixels(SEEN) for row in rows for source in row.pictures)
    if stored == "records":
        assert [type(row.pictures[0]) for row in (rows[0], rows[2])] == [bytes, File]


def test_data_sets_of_hugging_face(tmp_path):
    """In memory, saved and by split; pictures stay as they are stored until they are looked at."""
    import datasets

    def asked(number):
        content = [{"type": "image", "text": None}, *({"type": "text", "text": text} for text in ("what?", number))]
        return [{"role": "user", "content": content}]

    text = datasets.Value("string")
    data = datasets.Dataset.from_dict(
        {"prompt": list(map(asked, "0123")), "image": [picture(i) for i in range(4)], "answer": list("wxyz")},
        features=datasets.Features(
            prompt=[{"role": text, "content": [{"type": text, "text": text}]}], image=datasets.Image(), answer=text
        ),
    )
    parts = datasets.DatasetDict({"train": data.select([2, 0]), "test": data.select([1])})
    data.save_to_disk(str(tmp_path / "whole"))
    parts.save_to_disk(str(tmp_path / "parts"))
    config = make_config(task="text", data={"held_out": 0.0}, rewards=[{"name": "m.py:f"}])
    given = from_python(config, parts, None).prompts
    for read in (load_prompts(tmp_path / "parts"), given):
        assert [[row.columns["answer"] for row in part] for part in read] == [["y", "w"], [], ["x"]]
        for part, numbers in zip(read, ([2, 0], [], [1]), strict=True):
            for row, number in zip(part, numbers, strict=True):
                assert isinstance(row.pictures[0], bytes) and pixels(row.pictures[0]) == pixels(picture(number))
                assert row.messages == (Message("user", (None, "what?", str(number))),)
    whole = load_prompts(tmp_path / "whole", held_out=0).train
    assert [row.id for row in whole] == [0, 1, 2, 3] and pixels(whole[3].pictures[0]) == pixels(picture(3))
    assert len(from_python(config, data, None).prompts.train) == 4


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"image": "no.png"}, '"image": there is no picture'),
        (
            {"image": "https://a.b/c.png"},
            '"image": there is no picture https://a.b/c.png: web addresses are not fetched',
        ),
        (
            {"images": ["seen.png", 3]},
            "\"images\" 2: a picture is given as a path, as base64 text or as {'bytes': …}, got 3",
        ),
        ({"image": "iVBORw0KGgo" + "A" * 50}, "a picture is not valid base64"),
        ({"image": "seen.png", "images": ["nowhere.png"]}, "nowhere.png"),
        (
            {"image": "seen.png", "prompt": "<image> and <image>"},
            '"prompt" has <image> 2 times, and there are 1 pictures',
        ),
        ({"pictures": [1]}, "column 'pictures' is a name the trainer itself passes"),
        (
            {"prompt": [{"role": "user"}]},
            '"prompt", message 1: expected {"role": system | user | assistant, "content": text or a list of parts}',
        ),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, "the last message must be the user's"),
        (
            {"prompt": [{"role": "assistant", "content": "x", "tool_calls": [{"name": "f"}]}, {"role": "user"}]},
            '"prompt", message 1: tool_calls is not read: write it into the content, as the policy would',
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video"}]}]},
            "must be of type \"text\", with a text, or \"image\", got {'type': 'video'}",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "keeps 1 places for pictures, and there are 0",
        ),
    ],
)
def test_bad_rows_are_named(row, reason, tmp_path):
    SEEN.save(tmp_path / "seen.png")
    path = write_rows(tmp_path, [{"prompt": "fine"}, {"prompt": "x"} | row])
    with pytest.raises(UserError) as error:
        load_prompts(path, held_out=0)
    message = str(error.value)
    assert message.startswith(f"{path}: 1 bad line: line 2: ") and reason in message and "\n" not in message


def deep_values(low, high, dtype):
    """A grey picture as other programs write it: of 16 or 32 bits, or of floats."""
    return np.linspace(low, high, 12 * 20).reshape(12, 20).astype(dtype)


@pytest.mark.parametrize("name", ["16.png", "16.ppm", "float.tiff", "float", "overshot"])
def test_values_of_more_than_8_bits_are_taken_by_their_range(name, tmp_path):
    """Pillow cuts them off at 255: a picture of 16 bits would be white, floats to 1 black."""
    values = deep_values(0, 65535, np.uint16) if name.startswith("16") else deep_values(0, 1, np.float32)
    source = np.where(values == 1, np.float32(1.1), values) if name == "overshot" else values
    if "." in name:
        if name == "16.ppm":  # Pillow writes none of 16 bits
            (tmp_path / name).write_bytes(b"P5 20 12 65535 " + values.astype(">u2").tobytes())
        else:
            Image.fromarray(values).save(tmp_path / name)
        source = str(tmp_path / name)
    (row,) = make_prompt_set([{"prompt": "x", "image": source}]).train
    grey = np.round(values.astype(float) / values.max() * 255)
    np.testing.assert_array_equal(read_rgb(row.pictures[0]), np.stack([grey] * 3, axis=-1))
    (seen,) = asked([row])["image"][:1]
    assert seen.mode == "L" and size_of(row.pictures[0]) == (12, 20)


def spoilt(folder: Path) -> dict[str, Path]:
    """Files that are no still pictures of a usable size."""
    frames = [picture(i) for i in range(3)]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    frames[0].save(folder / "pages.tiff", save_all=True, append_images=frames[1:])
    (folder / "text.png").write_text("not a picture")
    Image.new("L", (3000, 10)).save(folder / "strip.png")
    huge = bytearray(bytes_of(Image.new("1", (1, 1))))
    huge[16:24] = (40_000).to_bytes(4, "big") * 2  # what its header says
    huge[29:33] = zlib.crc32(huge[12:29]).to_bytes(4, "big")
    (folder / "bomb.png").write_bytes(huge)
    Image.fromarray(deep_values(0, 255, np.float32)).save(folder / "float.tiff")
    Image.fromarray(deep_values(0, 70000, np.int32)).save(folder / "int32.tiff")
    (folder / "program.eps").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")
    return {path.name: path for path in folder.iterdir()}


SPOILT = {
    "moving.gif": "it has 3 frames, and a prompt takes still pictures: keep one of them",
    "pages.tiff": "it has 3 pages",
    "text.png": "it is no picture that can be read (PNG, JPEG",
    "strip.png": "it is 3000 x 10 pixels: a side may be at most 200 times as long as the other",
    "bomb.png": "it is broken (Image size (1600000000 pixels) exceeds limit of",
    "float.tiff": "its values are float32 from 0 to 255: expected uint8, uint16 (to 65535) or floats in [0, 1]",
    "int32.tiff": "its values are int32 from 0 to 7e+04: expected uint8, uint16 (to 65535) or floats in [0, 1]",
    "program.eps": "it is no picture that can be read",
}


def test_what_is_no_still_picture_is_one_line_with_row_and_file(tmp_path):
    class Vision:
        image_token, picture_tokens, merged = 262, (259, 262, 260, 263), 4

    files = spoilt(tmp_path)
    assert files.keys() == SPOILT.keys()
    image_processor = ImageProcessor(Vision, PictureSettings(), list)
    reasons = {f"{name}: {reason}": str(files[name]) for name, reason in SPOILT.items()}
    reasons["its values are float32 from 0 to 255: expected uint8"] = deep_values(0, 255, np.float32)
    reasons["its values are float32 from -1 to 1"] = deep_values(-1, 1, np.float32)
    reasons["its values are int32"] = Image.fromarray(deep_values(0, 9, np.int32))
    for reason, given in reasons.items():
        tokenizer = chat_tokenizer(VISION_TOKENS)
        with pytest.raises(UserError) as error:
            rows = make_prompt_set([{"prompt": "a"}, {"prompt": "b", "image": given}]).train
            make_encode(tokenizer, DataSection(), pad_id=0, rows=rows, image_processor=lambda: image_processor)
        message = str(error.value)
        assert "row 1" in message and reason in message, message
        assert len(message) < 250 and "\n" not in message


def test_cameras_and_transparency():
    """The right way up, and on white, as the processor has it."""
    tags = Image.Exif()
    tags[0x0112] = 6  # it lies on its side
    lying = bytes_of(SEEN, "JPEG", exif=tags, quality=95)
    for given in (lying, Image.open(io.BytesIO(lying))):
        assert size_of(given) == (20, 12) and open_picture(given).size == (12, 20)
    glass = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert pixels(bytes_of(glass)) == [[[255, 255, 255]] * 4] * 4
    assert pixels(bytes_of(Image.new("L", (2, 1), 9))) == [[[9, 9, 9]] * 2]
    palette = Image.new("P", (2, 1), 0)
    palette.info["transparency"] = 0
    assert pixels(bytes_of(palette, transparency=0)) == [[[255, 255, 255]] * 2]


def test_rows_that_ask_the_same_of_different_pictures_are_different_prompts(tmp_path):
    rows = load_prompts([{"prompt": "what?", "image": picture(i % 8)} for i in range(16)], held_out=0.25)
    sizes = [len(part) for part in rows]
    assert sizes == [8, 4, 4]
    parts = [{sources.digest(row.pictures[0]) for row in part} for part in rows]
    assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]  # duplicates stay together
    # A file is known by the name that the row gives it: the same on another machine.
    names = []
    for home in ("a", "b"):
        path = write_rows(tmp_path / home, [{"prompt": "what?", "image": picture(i)} for i in range(10)])
        names.append([[row.pictures[0].name for row in part] for part in load_prompts(path, held_out=0.2)])
    assert names[0] == names[1]
    with pytest.raises(UserError, match="this test prompt is also a train prompt"):
        load_prompts([{"prompt": "x", "image": SEEN, "split": split} for split in ("train", "test")])


def asked(rows, drawn=None):
    """The columns that a reward gets for rows with two completions each."""
    got = {}

    def reward(prompts, completions, **columns):
        got.update(columns, prompts=prompts)
        return [0.0] * len(completions)

    Score({"r": reward}, {}, missing=False)(rows, single_turns([["a", "b"]] * len(rows)), drawn)
    return got


def test_rewards_get_the_rows_pictures():
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "t"}, {"type": "image"}]},
    ]
    rows = make_prompt_set(
        [{"prompt": "x", "image": SEEN}, {"prompt": "y"}, {"prompt": messages, "images": [picture(1)]}]
    ).train
    got = asked(rows)
    assert got["prompts"] == ["x", "x", "y", "y", "t", "t"]
    assert [len(seen) for seen in got["images"]] == [1, 1, 0, 0, 1, 1] and got["pictures"] == got["images"]
    assert got["image"] == [SEEN, SEEN, None, None, got["images"][4][0], got["images"][4][0]]
    assert got["messages"][0] == [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}]
    assert got["messages"][2] == [{"role": "user", "content": "y"}] and got["messages"][4] == messages
    plain = asked(make_prompt_set([{"prompt": "y"}]).train)
    assert not plain.keys() & {"images", "image", "pictures", "messages"}


def test_where_something_is_drawn_images_are_what_was_drawn():
    drawn = SimpleNamespace(images=["d0", "d1"], baseline_images=None)
    got = asked(make_prompt_set([{"prompt": "x", "image": SEEN}]).train, drawn)
    assert got["images"] == ["d0", "d1"] and got["pictures"] == [[SEEN], [SEEN]] and "image" not in got


def test_rows_given_in_python_are_kept_beside_the_run(tmp_path):
    """So that a run that began in Python is resumed and evaluated like any other."""
    SEEN.save(tmp_path / "seen.png")
    conversation = [{"role": "user", "content": [{"type": "text", "text": "t"}, {"type": "image", "image": SEEN}]}]
    held = {"prompt": "what?", "images": [tmp_path / "seen.png", SEEN, bytes_of()], "n": 1}
    given = load_prompts([held, {"prompt": conversation}], held_out=0)
    config = make_config(task="text", rewards=[{"name": "m.py:f"}])
    notes = []
    keep_prompts(PythonInput(config, given, {}), RunDirectory(tmp_path), notes.append)
    assert not notes
    kept = kept_prompts(RunDirectory(tmp_path))
    for row, again in zip(given.train, kept.train, strict=True):
        assert dataclasses.replace(row, pictures=()) == dataclasses.replace(again, pictures=())
        assert [pixels(one) for one in row.pictures] == [pixels(one) for one in again.pictures]
    assert data_identity(PromptSet((), kept.train, ())) == data_identity(PromptSet((), given.train, ()))
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert lines[0]["pictures"][0] == str(tmp_path / "seen.png")


def test_held_out_pictures_identify_a_run_by_their_content(tmp_path):
    parts = ("train", "validation", "test")
    rows = [{"prompt": f"a {part}", "image": picture(n), "split": part} for n, part in enumerate(parts)]
    path = write_rows(tmp_path, rows)
    before = data_identity(load_prompts(path))
    shutil.copy(tmp_path / "2.png", tmp_path / "0.png")  # of the training row
    assert data_identity(load_prompts(path)) == before
    for held_out in ("1.png", "2.png"):
        kept = (tmp_path / held_out).read_bytes()
        picture(9).save(tmp_path / held_out)
        with pytest.raises(UserError, match=r"with other data or models .held-out pictures: digest .* → digest"):
            require_same_task(before, data_identity(load_prompts(path)), tmp_path)
        (tmp_path / held_out).write_bytes(kept)
    earlier = {name: value for name, value in before.items() if name != "held-out pictures"}
    require_same_task(earlier, data_identity(load_prompts(path)), tmp_path)  # of a version without the digest
    texts = [row | {"image": None} for row in rows]
    assert data_identity(load_prompts(texts)).keys() == earlier.keys()


@pytest.mark.parametrize(
    ("pictures", "message"),
    [
        ("absent.png", r'"images": .*absent\.png'),
        (Path("absent.png"), r'"images": .*absent\.png'),
        (["absent.png"], r'"images" 1: .*absent\.png'),
        (np.zeros((4, 6, 5), np.uint8), r'"images": .*got \[4, 6, 5\]'),  # one picture, not four of its rows
    ],
)
def test_a_rewriter_takes_a_list_of_pictures_or_one(pictures, message):
    folder = SimpleNamespace(tokenizer=None, pad_id=0, config=SimpleNamespace(vocab_size=9, vision=None))
    rewrite = make_rewriter(make_config(task="text"), SimpleNamespace(folder=folder))
    with pytest.raises(UserError, match=message):
        rewrite("What is this?", pictures)
