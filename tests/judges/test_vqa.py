"""P("Yes") against transformers itself, one picture at a time, and the rewards that use it."""

import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("open_clip")

from support import tiny_models  # noqa: E402
from support.vision.folders import TEMPLATE, seeing_folder  # noqa: E402
from support.vision.judged import noise, pillow  # noqa: E402

from bridges.judges.vqa import Vqa  # noqa: E402
from grpo_jax.config.run import make_config  # noqa: E402
from grpo_jax.errors import UserError  # noqa: E402
from grpo_jax.rollout.reward_registry import TaskRewards, bind, resolve_rewards  # noqa: E402
from grpo_jax.rollout.rewards import RewardError, collect_rewards  # noqa: E402
from grpo_jax.tasks.pictures import REWARDS  # noqa: E402

QUESTIONS = ["Is it red?", "Are there two dogs on the left of the table?", "Is it?", "Is it red?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return seeing_folder(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def judge(folder):
    return Vqa(path=str(folder), question="Is it {prompt}?", answer="Y", dtype="float32", batch_size=3).load("cpu")


@torch.no_grad()
def of_transformers(folder, image, question, answer):
    """The product of the answer's tokens' probabilities, each asked for by itself."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    seen = pillow(image)
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    text, probability = processor.apply_chat_template(asked, tokenize=False, add_generation_prompt=True), 1.0
    for letter in answer:
        logits = model(**processor(text=[text], images=[seen], return_tensors="pt")).logits[0, -1]
        probability *= logits.softmax(-1)[processor.tokenizer.convert_tokens_to_ids(letter)].item()
        text += letter
    return probability


def test_probabilities_are_those_of_transformers_whatever_else_is_in_the_batch(folder, judge):
    images = noise(4)
    expected = [of_transformers(folder, *pair, "Y") for pair in zip(images, QUESTIONS, strict=True)]
    found = judge.yes(images, QUESTIONS)
    torch.testing.assert_close(found, torch.tensor(expected), atol=0, rtol=1e-4)
    assert len(set(np.round(expected, 7))) == 4 and found.dtype == torch.float32
    assert judge.yes(images[:0], []).shape == (0,)


def test_an_answer_of_several_tokens_is_read_whole(folder):
    yes = Vqa(path=str(folder), answer="Yes", dtype="float32").load("cpu")
    images = noise(2)
    expected = [of_transformers(folder, image, "Is it red?", "Yes") for image in images]
    torch.testing.assert_close(yes.yes(images, ["Is it red?"] * 2), torch.tensor(expected), atol=0, rtol=1e-4)
    assert str(yes) == f"{folder}: Qwen2VLForConditionalGeneration, P('Yes'), on cpu"


def test_thinking_is_switched_off(folder, tmp_path):
    """Behind an open <think> no reply begins with Yes."""
    prompt, closed = TEMPLATE + "{% if add_generation_prompt %}<think>", "</think>{% endif %}"
    switch = "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}{% endif %}"
    images, read = noise(2), []
    for name, template in (("never", prompt + closed), ("hybrid", prompt + switch)):
        thinker = shutil.copytree(folder, tmp_path / name)
        (thinker / "chat_template.jinja").write_text(template)
        read.append(Vqa(path=str(thinker), answer="Y", dtype="float32").load("cpu").yes(images, ["Is it red?"] * 2))
    assert torch.equal(*read)
    (thinker / "chat_template.jinja").write_text(prompt + "{% endif %}")
    with pytest.raises(UserError, match="a model that replies without thinking"):
        Vqa(path=str(thinker)).load("cpu")


def reward(name, judge):
    """A reward of the picture tasks as a run binds it."""
    sections = make_config(task="text", rewards=[{"name": name}]).rewards
    (wanted,) = resolve_rewards(sections, (), TaskRewards(REWARDS), ("scorer", "vqa")).maximised
    return bind(wanted, {"scorer": object(), "vqa": judge})


def test_alignment_asks_a_question_of_the_prompt(judge):
    images, prompts = noise(2), ["red", "a {prompt} in braces"]
    columns = {"images": images, "baseline_images": images.flip(0)}
    found = collect_rewards({"a": reward("alignment@vqa", judge)}, prompts, ["x", "y"], columns, 2)
    expected = judge.yes(images, ["Is it red?", "Is it a {prompt} in braces?"])
    np.testing.assert_allclose(found.ravel(), expected.numpy(), rtol=1e-6)
    gain = collect_rewards({"a": reward("alignment_gain@vqa", judge)}, prompts, ["x", "y"], columns, 2)
    assert np.abs(gain).min() > 1e-9


def test_questions_of_the_row_give_their_mean_and_none_gives_none(judge):
    images = noise(3)
    columns = {"images": images, "questions": [["Is it red?", "Is it new?"], None, "Is it old?"]}
    ask = reward("questions@vqa", judge)
    found = collect_rewards({"q": ask}, ["p"] * 3, ["x"] * 3, columns, 3).ravel()
    first, second, last = judge.yes(images[[0, 0, 2]], ["Is it red?", "Is it new?", "Is it old?"]).tolist()
    np.testing.assert_allclose(found, [(first + second) / 2, np.nan, last], rtol=1e-5)
    nothing = collect_rewards({"q": ask}, ["p"] * 3, ["x"] * 3, columns | {"questions": [None, [], ""]}, 3)
    assert np.isnan(nothing).all()
    with pytest.raises(RewardError, match="needs a judge of kind vqa: name it questions@JUDGE"):
        collect_rewards({"q": reward("questions", judge)}, ["p"] * 3, ["x"] * 3, columns, 3)


def test_soft_tifa_is_the_geometric_mean_of_the_answers(judge, folder):
    """Each question with its own answer, in every spelling, asked of transformers by itself."""
    images, pairs = noise(2), [("How many dogs are there?", "two"), ("Is it red?", "Yes")]
    columns = {"images": images, "vqa_list": [[list(pair) for pair in pairs], None]}
    ask = reward("soft_tifa@vqa", judge)
    found = collect_rewards({"s": ask}, ["p"] * 2, ["x"] * 2, columns, 2).ravel()
    tokenizer, chances = transformers.AutoTokenizer.from_pretrained(folder), []
    for (question, answer), spellings in zip(pairs, (["two", "Two", "2"], ["yes", "Yes"]), strict=True):
        texts = [answer, *spellings, *(f" {text}" for text in spellings)]
        first = {tokenizer.tokenize(text)[0] for text in texts}
        first = {token for token in first if tokenizer.convert_tokens_to_string([token]).strip()}  # no blank
        asked = f"{question} Answer in one word."
        chances.append(sum(of_transformers(folder, images[0], asked, [token]) for token in first))
    np.testing.assert_allclose(found, [np.sqrt(chances[0] * chances[1]), np.nan], rtol=1e-4)
    digit = [[["How many dogs are there?", "2"], list(pairs[1])], None]
    same = collect_rewards({"s": ask}, ["p"] * 2, ["x"] * 2, columns | {"vqa_list": digit}, 2).ravel()
    np.testing.assert_allclose(same, found, rtol=1e-6)
    with pytest.raises(RewardError, match="needs a judge of kind vqa: name it soft_tifa@JUDGE"):
        collect_rewards({"s": reward("soft_tifa", judge)}, ["p"] * 2, ["x"] * 2, columns, 2)


def test_what_cannot_answer_is_refused(tmp_path):
    text = str(tiny_models.causal_lm(tmp_path / "text"))
    with pytest.raises(UserError, match="expected a model that sees pictures"):
        Vqa(path=text).load("cpu")
    plain = seeing_folder(tmp_path / "plain", template=None)
    (plain / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="expected a model with a chat template"):
        Vqa(path=str(plain)).load("cpu")
