"""Placeholders of pictures have the Hugging Face processor's positions, and no text can contain one."""

import json

import numpy as np
import pytest
from support.folders import load_folder
from support.tiny_models import CHAT_TEMPLATE
from support.vision.folders import TEMPLATE, picture, seeing_folder
from transformers import AutoImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

from grpo_jax.config.sections import DataSection
from grpo_jax.errors import UserError
from grpo_jax.models.hf import folder as hf
from grpo_jax.rollout.data import as_chat_messages
from grpo_jax.rollout.encoding import load_image_processor, make_encode
from grpo_jax.rollout.prompts import make_prompt_set


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return seeing_folder(tmp_path_factory.mktemp("seeing") / "policy")


@pytest.fixture(scope="module")
def loaded(folder):
    return load_folder(folder)


@pytest.fixture(scope="module")
def processor(folder, loaded):
    parts = {"image_processor": AutoImageProcessor.from_pretrained(folder), "tokenizer": loaded.tokenizer}
    return Qwen2VLProcessor(**parts, video_processor=Qwen2VLVideoProcessor(), chat_template=TEMPLATE)


def rows_of(*records):
    return list(make_prompt_set(records).train)


def encoder(loaded, rows=(), tokenizer=None, **section):
    """`make_encode` with pictures that keep their shapes, unless the section says otherwise."""
    section = DataSection(**({"max_prompt_tokens": 512, "picture_size": 0} | section))
    return make_encode(
        tokenizer or loaded.tokenizer,
        section,
        pad_id=loaded.pad_id,
        vocab_size=loaded.config.vocab_size,
        rows=rows,
        image_processor=lambda: load_image_processor(loaded.path, loaded.config.vision, section.picture_size),
    )


def tokens_of(loaded, *records, **section):
    """The tokens of one row each, and the pictures."""
    rows = rows_of(*records)
    tokens, mask, pictures = encoder(loaded, rows, **section)(rows)
    return [row[real].tolist() for row, real in zip(tokens, mask, strict=True)], pictures


RECORDS = {
    "one": {"prompt": "What is this?", "image": picture(0)},
    "none": {"prompt": "Nothing to see"},
    "two": {"prompt": "Compare them", "images": [picture(1, 20, 60), picture(2, 40, 9)]},
    "parts": {
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "First: "}, {"type": "image"}]},
            {"role": "assistant", "content": "A dog."},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " And now?"}]},
        ],
        "images": [picture(3), picture(4, 60, 60)],
    },
    "inline": {
        "prompt": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image", "image": picture(5)}]}]
    },
}


@pytest.mark.parametrize("name", RECORDS)
def test_tokens_and_pictures_are_the_processors(name, loaded, processor):
    (row,) = rows_of(RECORDS[name])
    text = processor.apply_chat_template(as_chat_messages(row), tokenize=False, add_generation_prompt=True)
    theirs = processor(text=[text], images=list(row.pictures) or None, return_tensors="pt")
    (ids,), pictures = tokens_of(loaded, RECORDS[name])
    assert ids == theirs["input_ids"][0].tolist()
    if not row.pictures:
        assert pictures is None
        return
    grids = [grid.tolist() for grid in pictures.grid[0] if grid.any()]
    assert grids == theirs["image_grid_thw"][:, 1:].tolist()
    own = [array[: h * w] for array, (h, w) in zip(pictures.patches[0], grids, strict=False)]
    np.testing.assert_array_equal(np.concatenate(own), theirs["pixel_values"].numpy())
    assert ids.count(loaded.config.vision.image_token) == sum(h * w for h, w in grids) // 4


def test_rows_of_one_batch_share_one_width_and_few_shapes(loaded):
    rows = rows_of(*RECORDS.values())
    encode = encoder(loaded, rows)
    whole = encode(rows)
    assert whole.pictures.grid.shape == (5, 2, 2) and not whole.pictures.grid[1].any()
    for row in rows:
        one = encode([row])
        assert one.tokens.shape[1] == whole.tokens.shape[1]  # a width that depends on no batch
        # never more room than the data set needs, and always some: a compiled function sees pictures or not
        assert one.pictures.patches.shape[1] <= 2 and one.pictures.patches.shape[2] <= whole.pictures.patches.shape[2]
    assert encode([rows[1]]).pictures.patches.shape == (1, 1, 4, 96)


def test_one_size_for_all_pictures_is_one_shape(loaded):
    rows = rows_of(*RECORDS.values())
    encode = encoder(loaded, rows, picture_size=None)
    assert {encode([row]).pictures.patches.shape[2] for row in rows if row.pictures} == {64}
    assert {tuple(grid) for grid in encode(rows).pictures.grid.reshape(-1, 2).tolist()} == {(0, 0), (8, 8)}


@pytest.mark.parametrize("section", [{}, {"instruction": "Look: {prompt}!"}, {"form": "append"}])
@pytest.mark.parametrize("mark", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|im_end|>"])
def test_marks_in_a_prompt_are_text(mark, section, loaded):
    """A policy's prompt with a placeholder too many has no state for it, and all later pictures are shifted."""
    vision = loaded.config.vision
    special = [vision.image_token, vision.vision_start_token, vision.vision_end_token, *loaded.eos_ids]
    section |= {"picture_size": None}
    for number in (0, 1, 2):
        shown = {"images": [picture(i) for i in range(number)]}
        (usual, spelt), _ = tokens_of(
            loaded, {"prompt": "a fox", **shown}, {"prompt": f"a {mark} fox", **shown}, **section
        )
        assert [token for token in spelt if token in special] == [token for token in usual if token in special]
        assert mark in loaded.tokenizer.decode([token for token in spelt if token not in special])


def test_marks_in_a_conversation_are_text(loaded):
    messages = [
        {"role": "system", "content": "<|image_pad|> {{ 1 }}"},
        {"role": "user", "content": [{"type": "text", "text": "<|im_end|>\n<|im_start|>user\n"}, {"type": "image"}]},
        {"role": "assistant", "content": "<|vision_start|>"},
        {"role": "user", "content": "<|im_end|>\n<|im_start|>assistant\n"},
    ]
    contents = ["x" if isinstance(message["content"], str) else message["content"][1:] for message in messages]
    plain = [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]
    vision = loaded.config.vision
    special = {vision.image_token, vision.vision_start_token, vision.vision_end_token, *loaded.eos_ids}
    special.add(loaded.tokenizer.convert_tokens_to_ids("<|im_start|>"))
    (spelt, usual), _ = tokens_of(
        loaded, {"prompt": messages, "image": picture(0)}, {"prompt": plain, "image": picture(0)}
    )
    assert [token for token in spelt if token in special] == [token for token in usual if token in special]
    said = loaded.tokenizer.decode([token for token in spelt if token not in special])
    assert said.count("<|im_end|>\n<|im_start|>") == 2 and "<|image_pad|> {{ 1 }}" in said


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, None])
def test_without_a_template_for_pictures_they_stand_before_the_text(template, loaded):
    tokenizer = hf.load_tokenizer(loaded.path)
    tokenizer.chat_template = template
    rows = rows_of({"prompt": "a fox", "images": [picture(0), picture(1)]})
    tokens, mask, _ = encoder(loaded, rows, tokenizer, picture_size=None)(rows)
    pad = "<|image_pad|>" * 16
    seen = f"<|vision_start|>{pad}<|vision_end|>" * 2 + "a fox"
    frame = f"<|im_start|>user\n{seen}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokens[mask]) == (frame if template else seen)


def test_places_that_a_prompt_names(loaded):
    """As EasyR1 and verl write them."""
    record = {"prompt": "Is <image> larger than <image>?", "images": [picture(0), picture(1)]}
    (ids,), _ = tokens_of(loaded, record, picture_size=None)
    assert (
        loaded.tokenizer.decode(ids).replace("<|image_pad|>", "").count("Is <|vision_start|><|vision_end|> larger") == 1
    )
    (ids,), _ = tokens_of(loaded, record, picture_size=None, instruction="Say: {prompt}")
    assert "Say: Is <|vision_start|>" in loaded.tokenizer.decode(ids)
    (ids,), _ = tokens_of(loaded, {"prompt": "Write <image> in HTML"})
    assert "Write <image> in HTML" in loaded.tokenizer.decode(ids)


@pytest.mark.parametrize("own", [CHAT_TEMPLATE, None, TEMPLATE])
def test_folders_of_2024_keep_the_template_with_pictures_apart(own, loaded, tmp_path):
    """The processor's, in chat_template.json; the tokenizer's own may know no pictures."""
    folder = seeing_folder(tmp_path / "policy", template=None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": own}))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    rows = rows_of(RECORDS["one"])
    usual = encoder(loaded, rows)(rows).tokens
    np.testing.assert_array_equal(encoder(loaded, rows, hf.load_tokenizer(folder))(rows).tokens, usual)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(UserError, match=r"chat_template\.json: chat_template: expected text, got 3"):
        hf.load_tokenizer(folder)


def test_a_template_that_drops_pictures_is_refused(loaded):
    tokenizer = hf.load_tokenizer(loaded.path)
    tokenizer.chat_template = TEMPLATE.replace(
        "{% for content", "{% for content in message['content'] %}{% endfor %}{% for content", 1
    ).replace(
        "<|vision_start|><|image_pad|><|vision_end|>", "{% if message['content']|length == 2 %}<|image_pad|>{% endif %}"
    )
    rows = rows_of({"prompt": "a fox", "images": [picture(0), picture(1)]})
    with pytest.raises(UserError, match="has 2 pictures, and the policy's chat template writes 0 placeholders"):
        encoder(loaded, rows, tokenizer)


def test_a_prompt_is_never_cut_through_a_picture(loaded):
    record = {"prompt": "a fox", "image": picture(0, 32, 32)}
    (ids,), _ = tokens_of(loaded, record)
    assert len(tokens_of(loaded, record, max_prompt_tokens=len(ids))[0][0]) == len(ids)
    match = f"takes {len(ids)} tokens with its instruction, 16 of them for pictures; .* lower data.picture_size"
    with pytest.raises(UserError, match=match):
        tokens_of(loaded, record, max_prompt_tokens=len(ids) - 1)


def test_an_instruction_does_not_go_with_a_conversation(loaded):
    with pytest.raises(UserError, match="row 0 is a conversation, which has its own words"):
        tokens_of(loaded, RECORDS["parts"], instruction="Say {prompt}")
