"""Judges through the command: a reward model and a server as rewards, async rewards, and messages."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("open_clip")

from judges.test_http import EXAMPLE
from support import tiny_models
from support.served import serving
from support.text_task import SHORT, completions, rows, train_here
from support.vision.folders import seeing_folder

from bridges.judges.clip_model import ClipModel
from bridges.judges.object_detection import ObjectDetection
from bridges.judges.sequence_classification import SequenceClassification
from bridges.judges.vqa import Vqa
from grpo_jax.config.judge import title
from grpo_jax.config.named import load_object
from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.rollout.reward_registry import TaskRewards, bind, resolve_rewards

WAITING = """
import asyncio

both = asyncio.Barrier(2)  # each waits for the other

async def letters(completions):
    await asyncio.wait_for(both.wait(), 60)
    return [sum(c.isalpha() for c in text) for text in completions]

async def wished(completions, wish, preference):
    assert "on cpu" in str(preference)
    await asyncio.wait_for(both.wait(), 60)
    return [text.count(letter) for text, letter in zip(completions, wish)]
"""

FOLDERS = [
    (tiny_models.reward_model, SequenceClassification, "model"),
    (tiny_models.clip_model, ClipModel, "model"),
    (seeing_folder, Vqa, "model"),
    (tiny_models.detector, ObjectDetection, "model"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.reward_model(tmp_path_factory.mktemp("reward_model"))


def test_a_run_learns_from_a_reward_model_a_server_and_rewards_that_wait(place, folder, tmp_path):
    (tmp_path / "waiting.py").write_text(WAITING)
    rewards = ["preference", "brevity", "gone", f"{tmp_path}/waiting.py:letters", f"{tmp_path}/waiting.py:wished"]
    run = tmp_path / "run"
    server = load_object(f"{EXAMPLE}:Judge", "server")
    with serving(server) as closed:
        pass
    with serving(server) as url:
        judges = {
            "preference": {"kind": "sequence_classification", "path": str(folder)},
            "brevity": {"kind": "examples/judges/http.py:Http", "url": url, "batch_size": 3},
            "gone": {"kind": "examples/judges/http.py:Http", "url": closed, "attempts": 1},
        }
        words = ["--training.max_steps=2", "--evaluation.every=0", "--on_judge_error=missing"]
        words += ["--judges", json.dumps(judges), "--rewards", json.dumps([{"name": name} for name in rewards])]
        assert train_here(place.config, run, *words, *SHORT) == 0
    assert [(row["missing/gone"], row.get("missing/letters", 0.0)) for row in rows(run)] == [(1.0, 0.0)] * 2
    table = completions(run, 2)
    judge = SequenceClassification(path=str(folder)).load("cpu")
    expected = judge(table["prompt"], table["completion"])
    np.testing.assert_allclose(table["reward/preference"], expected.numpy(), atol=1e-5)
    assert np.ptp(table["reward/preference"]) > 1e-3
    brief = [
        1 - len(text) / len(prompt) if text else None
        for prompt, text in zip(table["prompt"], table["completion"], strict=True)
    ]
    np.testing.assert_allclose(np.array(table["reward/brevity"], float), np.array(brief, float), atol=1e-6)
    assert table["reward/letters"] == [sum(c.isalpha() for c in text) for text in table["completion"]]
    log = (run / "train.log").read_text()
    assert f"{folder}: Qwen2ForSequenceClassification" in log and f"{url}: 4 requests at once, of 3 completions" in log
    assert {"preference", "brevity"} <= json.loads((run / "summary.json").read_text())["devices"].keys()


@pytest.mark.parametrize(("make", "kind", "part"), FOLDERS)
def test_the_plan_counts_its_weights_which_must_be_there(make, kind, part, tmp_path):
    import torch

    judge = kind(path=str(make(tmp_path / "folder")), dtype="bfloat16")
    loaded = judge.load("cpu")
    weights = [*(loaded.model.model if kind is ClipModel else loaded._model).parameters()]
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    assert judge.memory()[0] == (part, sum(weight.nbytes for weight in weights), "bfloat16")
    assert ClipModel(dtype="bfloat16").memory()[0] == ("model", 2 * 986_109_441, "bfloat16")  # of a table
    with pytest.raises(UserError, match="no such folder: /nowhere/at/all"):
        kind(path="/nowhere/at/all").check()


def test_a_judge_that_is_no_reward_says_so_before_anything_runs():
    sections = make_config(task="text", rewards=[{"name": "pick"}]).rewards
    (wanted,) = resolve_rewards(sections, (), TaskRewards(), ("pick",)).maximised
    with pytest.raises(UserError, match=r"pick: judges.pick is not a reward; name one that uses it"):
        bind(wanted, {"pick": object()})
    given = make_config(task="text", rewards=[{"name": "pick", "options": {"size": 2}}]).rewards
    with pytest.raises(UserError, match=r"rewards.pick.options: expected arguments of the reward \(it has none\)"):
        resolve_rewards(given, (), TaskRewards(), ("pick",))
    with pytest.raises(UserError, match="got 'pikc'"):
        resolve_rewards(make_config(task="text", rewards=[{"name": "pikc"}]).rewards, (), TaskRewards(), ("pick",))


@pytest.mark.parametrize("known", [True, False], ids=["of a model that is known", "of one that is not"])
@pytest.mark.parametrize(("make", "kind", "part"), FOLDERS)
def test_code_of_a_folder_is_not_run(make, kind, part, known, tmp_path):
    folder, ran = make(tmp_path / "folder"), tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        if (folder / name).exists():
            fields = json.loads((folder / name).read_text()) | ({} if known else {"model_type": "own"})
            tasks = ("", "ForSequenceClassification", "ForImageTextToText", "ForObjectDetection")
            autos = ["AutoConfig", "AutoImageProcessor", "AutoProcessor", *(f"AutoModel{task}" for task in tasks)]
            own = {**dict.fromkeys(autos, "own.Own"), "AutoTokenizer": [None, "own.Own"]}
            (folder / name).write_text(json.dumps(fields | {"auto_map": own}))
    if known:
        kind(path=str(folder)).load("cpu")
    else:
        with pytest.raises(UserError, match="cannot load") as caught:
            kind(path=str(folder)).load("cpu")
        assert "\n" not in str(caught.value)
    assert not ran.exists()


OWN = """
from grpo_jax import Judge

class Vowels(Judge):
    letters: str = "aeiou"

    def __call__(self, prompts, completions, **columns):
        return [sum(text.count(letter) for letter in self.letters) for text in completions]
"""


def test_a_judge_may_be_its_own_reward_and_then_takes_no_card(tmp_path):
    (tmp_path / "vowels.py").write_text(OWN)
    config = make_config(task="text", judges={"vowels": {"kind": f"{tmp_path}/vowels.py:Vowels", "letters": "a"}})
    judge = config.judges["vowels"]
    assert config.requests == {"policy": "auto", "vowels": "cpu"} and judge.memory()[0][1] == 0
    assert title(judge.load("cpu")) == "Vowels" and judge.load("cpu")(["p"], ["banana"]) == [3]
