"""The start of the policy that sees: what it is told, how it reads pictures, and the folder that ships."""

from pathlib import Path

import numpy as np
import pytest

from bridges.miniature import path

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from scripts.miniature import lessons  # noqa: E402
from scripts.miniature import train_policy_vl as start  # noqa: E402


def conversations(rates, count=24, seed=0):
    rng = np.random.default_rng(seed)
    told = lessons.beliefs(rng, rates)
    return [lessons.recreate(rng, rates, told) if i % 2 else lessons.refine(rng, rates) for i in range(count)]


@pytest.fixture(scope="module")
def tokenizer():
    return start.seeing_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return start.untrained(tokenizer, 0)


def messages_of(turns):
    messages = []
    for turn in turns:
        shown = [] if turn.picture is None else [{"type": "image"}]
        messages.append({"role": "user", "content": [*shown, {"type": "text", "text": turn.text}]})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages


def test_lessons_become_the_tokens_of_the_chat_template(tokenizer):
    told = conversations(lessons.WEAK)
    batch = start.make_encode(tokenizer)(told)
    for row, turns in enumerate(told):
        text = tokenizer.apply_chat_template(messages_of(turns), tokenize=False)
        ids = tokenizer(text.replace(start.IMAGE, start.IMAGE * 16), add_special_tokens=False).input_ids
        assert batch.tokens[row, : len(ids)].tolist() == ids
        taught = batch.targets[row][batch.targets[row] >= 0].tolist()
        assert tokenizer.decode(taught).split() == " ".join(f"{t.answer}{start.END}" for t in turns).split()


def test_towers_and_logits_are_those_of_transformers(tokenizer, model):
    told = conversations(lessons.WEAK, 8)
    batch = start.make_encode(tokenizer)(told)
    pictures = [torch.from_numpy(turn.picture) for turns in told for turn in turns if turn.picture is not None]
    prepared = start.image_processor()(images=pictures, do_rescale=False, return_tensors="pt")
    torch.testing.assert_close(batch.patches.flatten(0, 1), prepared.pixel_values, rtol=0, atol=1e-6)
    mask = (batch.tokens != tokenizer.pad_token_id).long()
    with torch.no_grad():
        states = start.see(model.model.visual, batch.patches)
        theirs = model(
            input_ids=batch.tokens,
            attention_mask=mask,
            mm_token_type_ids=(batch.tokens == model.config.image_token_id).int(),
            **prepared,
        ).logits
        ours = start.logits_of(model, batch, states)
    torch.testing.assert_close(ours, theirs[batch.targets >= 0], rtol=0, atol=1e-5)


def test_the_folder_is_a_qwen2_vl_of_half_precision():
    from safetensors import safe_open
    from transformers import AutoConfig

    folder = path("policy_vl")
    config = AutoConfig.from_pretrained(folder)
    assert config.model_type == "qwen2_vl"
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    tower = sum(tensor.numel() for name, tensor in tensors.items() if "visual" in name)
    assert 200_000 < tower < 600_000
    assert {"preprocessor_config.json", "chat_template.jinja"} <= {Path(file).name for file in folder.iterdir()}
