"""Reward models against transformers itself: equal scores singly and in batches, and errors."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support import tiny_models  # noqa: E402
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors  # noqa: E402

from bridges.judges.sequence_classification import SequenceClassification  # noqa: E402
from grpo_jax.errors import UserError  # noqa: E402
from grpo_jax.models.hf.chat import Message  # noqa: E402
from grpo_jax.rollout.data import Row  # noqa: E402
from grpo_jax.rollout.env import Episode, Observation, Turn  # noqa: E402
from grpo_jax.rollout.reward_registry import JUDGE_AS_REWARD, ResolvedReward, bind  # noqa: E402
from grpo_jax.rollout.rewards import Score  # noqa: E402

PROMPTS = ["2+2?", "What is the capital of France?", "Say nothing.", "2+2?", "again"]
ANSWERS = ["4", "It is Paris, and has been for long.", "", "5", "4" * 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.reward_model(tmp_path_factory.mktemp("reward_model"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A BERT with three labels, a tokenizer of pairs and no chat template."""
    folder = tmp_path_factory.mktemp("encoder")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("[CLS]", "[SEP]", "[PAD]")])
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=128,
        initializer_range=0.3,
        id2label={0: "bad", 1: "fair", 2: "good"},
    )
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@torch.no_grad()
def of_transformers(folder, *texts, **options):
    """The logits of one input, by itself."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return model(**tokenizer(*([text] for text in texts), return_tensors="pt", **options)).logits[0]


def chat(folder, messages):
    text = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
    return of_transformers(folder, text, add_special_tokens=False)[0]


def test_scores_are_the_models_own_of_each_conversation_alone(folder):
    judge = SequenceClassification(path=str(folder), batch_size=2).load("cpu")
    rows = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)
    ]
    expected = torch.stack([chat(folder, row) for row in rows])
    found = judge(PROMPTS, ANSWERS, answer=["a column"] * 5)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert expected.std() > 1e-2 and found.dtype == torch.float32
    assert judge([], []).shape == (0,)
    assert str(judge) == f"{folder}: Qwen2ForSequenceClassification, its chat template, 4096 tokens, on cpu"


def test_a_conversation_is_judged_as_a_whole(folder):
    judge = SequenceClassification(path=str(folder)).load("cpu")
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    expected = chat(folder, [*asked, {"role": "assistant", "content": "4"}])
    parts = [{"type": "image"}, {"type": "text", "text": "2+2"}, {"type": "text", "text": "?"}]
    for messages in (asked, [asked[0], {"role": "user", "content": parts}]):
        torch.testing.assert_close(judge(["2+2?"], ["4"], prompt_messages=[messages])[0], expected, atol=1e-5, rtol=0)
    assert judge(["2+2?"], ["4"]) != judge(["2+2?"], ["4"], prompt_messages=[asked])


def test_a_column_messages_beside_the_prompt_is_no_part_of_it(folder):
    """Published data sets often keep there the whole conversation, with its reference answer."""
    judge = SequenceClassification(path=str(folder)).load("cpu")
    reward = bind(ResolvedReward("rm", JUDGE_AS_REWARD, "rm", messages=None), {"rm": judge})
    whole = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}]
    asked = (Message("system", ("Be brief.",)), Message("user", ("2+2?",)))
    rows = [Row(0, "2+2?", {"messages": whole}), Row(1, "2+2?", {"messages": whole}, messages=asked)]
    episodes = [[Episode((Turn("4"),), final=True)] for _ in rows]
    found, _ = Score({"rm": reward}, {}, missing=False)(rows, episodes, None)
    system, answer = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "4"}
    expected = [chat(folder, [whole[0], answer]), chat(folder, [system, whole[0], answer])]
    np.testing.assert_allclose(found[:, 0, 0], expected, atol=1e-5)


def test_an_episode_is_judged_with_its_earlier_turns_and_observations(folder):
    """As in TRL: the last turn alone is no answer to the prompt."""
    judge = SequenceClassification(path=str(folder)).load("cpu")
    reward = bind(ResolvedReward("rm", JUDGE_AS_REWARD, "rm", messages=None), {"rm": judge})
    episode = Episode((Turn("2 plus 2", observation=Observation("4")), Turn("It is 4.")), final=True)
    found, _ = Score({"rm": reward}, {}, missing=False, role="tool")([Row(0, "2+2?")], [[episode]], None)
    texts = (("user", "2+2?"), ("assistant", "2 plus 2"), ("tool", "4"), ("assistant", "It is 4."))
    expected = chat(folder, [{"role": role, "content": text} for role, text in texts])
    np.testing.assert_allclose(found, [[[expected]]], atol=1e-5)


def test_without_a_template_the_pair_is_read_and_the_label_says_which_output(encoder):
    judges = {name: SequenceClassification(path=str(encoder), label=name, batch_size=3) for name in ("bad", "good")}
    for judge in judges.values():
        judge.check()
    prompts, answers = PROMPTS[:4], ANSWERS[:4]
    pairs = zip(prompts, answers, strict=True)
    expected = torch.stack([of_transformers(encoder, *pair) for pair in pairs])
    assert expected.std(dim=0).min() > 1e-2
    for column, judge in ((0, judges["bad"]), (2, judges["good"])):
        torch.testing.assert_close(judge.load("cpu")(prompts, answers), expected[:, column], atol=1e-5, rtol=0)
    with pytest.raises(UserError, match="label: expected one of the 3 outputs, bad, fair, good"):
        SequenceClassification(path=str(encoder)).check()


def test_of_a_text_that_is_too_long_the_end_is_read(folder, encoder):
    short = SequenceClassification(path=str(folder), max_tokens=20).load("cpu")
    first, second, other = short(["x" * 90, "y" * 90, "x" * 90], ["the end", "the end", "an end!"])
    assert first == second != other
    judge = SequenceClassification(path=str(encoder), label="good", max_tokens=500).load("cpu")
    assert "pairs, 128 tokens" in str(judge)  # as many as it has positions for
    assert torch.isfinite(judge(["x" * 200], ["y" * 300])).all()


def test_a_tokenizer_without_padding_pads_with_its_end(tmp_path):
    """As TRL does; the score is then read before the padding, whatever the config says."""
    folder = tiny_models.reward_model(tmp_path, pad_token_id=None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    found = SequenceClassification(path=str(folder)).load("cpu")(PROMPTS, ANSWERS)
    pairs = zip(PROMPTS, ANSWERS, strict=True)
    expected = [of_transformers(folder, *pair)[0] for pair in pairs]
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=0)


def test_a_language_model_is_no_reward_model(tmp_path):
    """transformers would draw the head at random, and say so in a log line."""
    folder = str(tiny_models.causal_lm(tmp_path, num_labels=1))
    with pytest.raises(UserError, match=r"as a Qwen2ForSequenceClassification: its weights lack score.weight"):
        SequenceClassification(path=folder).load("cpu")
