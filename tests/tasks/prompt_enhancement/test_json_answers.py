"""task.answer json: an answer is read whole or not at all, and the renderer gets exactly what it says."""

import json
from types import SimpleNamespace

import pyarrow.parquet
import pytest

from bridges import miniature
from grpo_jax.config import make_config
from grpo_jax.errors import UserError
from grpo_jax.models.hf.folder import read_folder
from grpo_jax.rollout.data import Row
from grpo_jax.rollout.texts import policy_choices
from grpo_jax.runs.warm_start import supervised_tokens
from grpo_jax.tasks.json_answer import JsonAnswer
from grpo_jax.tasks.pictures import make_render

ALL = JsonAnswer(True, [1.5, 6], [5, 20])
ROOM = {"max_new_tokens": 60}
WHOLE = {"prompt": 'a "red" fox', "negative_prompt": "", "guidance": 4.5, "steps": 20}


def test_an_answer_is_read_whole():
    reading = ALL.read(json.dumps(WHOLE), "fox")
    assert reading == ('a "red" fox', True, {"negative_prompt": "", "guidance": 4.5, "steps": 20})
    assert JsonAnswer().read('{"prompt": "a fox"}', "fox") == ("a fox", True, {})
    moves, state = ALL.moves(), 0
    for byte in json.dumps(WHOLE).encode():
        state = moves[state, byte]
    assert state == len(moves) - 1


@pytest.mark.parametrize("template", [True, False])
def test_a_warm_start_teaches_answers_as_they_are_sampled(template):
    config = make_config(task={"kind": "prompt_enhancement", "answer": "json", "steps": [1, 9]}, sampling=ROOM)
    folder = read_folder(miniature.path("policy"))
    if not template:
        folder.tokenizer.chat_template = None
    parts = SimpleNamespace(
        config=config, policy=SimpleNamespace(folder=folder), task_data=SimpleNamespace(choices=None)
    )
    form, node, text = policy_choices(config, None, folder), 0, json.dumps({"prompt": "a red fox", "steps": 3})
    tokens = supervised_tokens(parts, "fox", text)
    for token in tokens:
        node = form.follow(node, token)
    assert form.text[node] == 0 and folder.tokenizer.decode(tokens) == text


@pytest.mark.parametrize(
    "written",
    [
        *(json.dumps(WHOLE)[:end] for end in (0, 5, 30, -1)),  # cut off
        *(json.dumps({**WHOLE, name: value}) for name, value in [
            ("prompt", ""), ("prompt", " ,!"), ("prompt", 3), ("negative_prompt", None), ("guidance", 1.4),
            ("guidance", 6.5), ("guidance", "4.5"), ("guidance", True), ("guidance", float("nan")), ("steps", 21),
            ("steps", 4), ("steps", 7.5), ("steps", 7.0), ("steps", True), ("size", 512),
        ]),
        json.dumps({name: WHOLE[name] for name in ("prompt", "guidance", "negative_prompt", "steps")}),
        json.dumps({name: WHOLE[name] for name in ("prompt", "guidance", "steps")}),
        json.dumps(WHOLE)[:-1] + ', "steps": 20}',
        json.dumps([WHOLE]), "7", '"a fox"', "null", "[]", "[[]]", f"Sure! {json.dumps(WHOLE)}", "[" * 100_000,
    ],
)  # fmt: skip
def test_an_answer_that_is_not_all_there_is_never_half_used(written):
    assert ALL.read(written, "fox") == ("fox", False, {})


def test_the_renderer_gets_the_fields_of_each_text():
    asked = []

    class Renderer:
        device = "cpu"

        def draw(self, texts, seeds, *, evaluation, settings=None):
            import torch

            asked.append((texts, settings))
            return torch.zeros(len(texts), 3, 1, 1)

    config = make_config(task={"kind": "prompt_enhancement", "answer": "json", "steps": [1, 9]})
    rows, settings = [Row(3, "a dog"), Row(8, "a cat")], [[{"steps": 3}, {}], [{}, {"steps": 9}]]
    make_render({"renderer": Renderer()}, config, baselines=True)(rows, [["a", "b"], ["c", "d"]], 0, False, settings)
    assert asked == [(["a", "b", "c", "d"], [{"steps": 3}, {}, {}, {"steps": 9}]), (["a dog", "a cat"], None)]

    class Own(Renderer):
        def draw(self, texts, seeds, *, evaluation):
            raise AssertionError

    with pytest.raises(UserError, match=r"task.answer: expected text with a renderer whose draw takes no settings"):
        make_render({"renderer": Own()}, config, baselines=True)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"steps": [1, 9]}, r"task.answer: expected \"json\", to set steps, got 'text'"),
        ({"answer": "json", "steps": [9, 1]}, r"task.steps: expected \[least, most\] from 1 to 1000"),
        ({"answer": "json", "guidance": [0.5, 1]}, r"task.guidance: expected \[least, most\] from 1 to 100"),
        ({"answer": "json", "guidance": [1.1, 1.4]}, r"task.guidance: expected bounds with a half between"),
        ({"answer": "json", "negative_prompt": True}, "a StableDiffusion3, has no such field, got True"),
        ({"answer": "json", "form": "append"}, r'data.form: expected "rewrite" with task.answer "json"'),
    ],
)
def test_fields_that_cannot_be_set_are_refused_by_name(choices, message):
    data = {"form": choices.pop("form", "rewrite")}
    with pytest.raises(UserError, match=message):
        make_config(task={"kind": "prompt_enhancement", **choices}, data=data)


SMALL = {
    "task.answer": "json", "task.negative_prompt": True, "task.guidance": [1, 3], "task.steps": [1, 3],
    "judges.renderer.kind": "text_to_image", "judges.renderer.guidance": 2.0, "judges.renderer.eval_guidance": 2.0,
    "sampling.group_size": 4, "sampling.max_new_tokens": 96, "data.allowed_tokens": "ascii",
    "training.prompts_per_batch": 2, "training.max_steps": 1, "evaluation.prompts": 2,
    "evaluation.validation_prompts": 2, "evaluation.every": 0, "evaluation.gallery": 2, "evaluation.sampled": "false",
    "report_to": "[]",
    "rewards": "[alignment]",
}  # fmt: skip


def test_the_command_draws_what_answers_say(tmp_path, monkeypatch, capsys):
    pytest.importorskip("diffusers")
    pytest.importorskip("open_clip")
    from bridges.diffusion import Renderer
    from grpo_jax import predict
    from grpo_jax.train import main

    drawn, draw = [], Renderer._draw

    def record(self, batch, settings, *pictures):
        drawn.extend(batch)
        for _, _, own in batch:
            assert (own.steps, own.guidance) == (settings.steps, settings.guidance)
        return draw(self, batch, settings, *pictures)

    monkeypatch.setattr(Renderer, "_draw", record)
    folder = tmp_path / "run"
    assert main([*(f"--{name}={value}" for name, value in SMALL.items()), f"--run_dir={folder}"]) == 0
    table = pyarrow.parquet.read_table(folder / "completions" / "step_000001.parquet").to_pydict()
    assert not any(table["truncated"]) and sum(table["usable"]) >= 4
    keys = {(prompt, own.negative_prompt, own.guidance, own.steps) for prompt, _, own in drawn}
    for written, text, usable in zip(table["completion"], table["text"], table["usable"], strict=True):
        fields = json.loads(written)
        assert [*fields] == ["prompt", "negative_prompt", "guidance", "steps"]
        if usable:
            assert text == fields["prompt"].strip()
            assert (text, *[*fields.values()][1:]) in keys
    capsys.readouterr()
    assert predict.main(["--run", str(folder), "--prompt", "a huge crimson disc"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [*answer] == ["prompt", "completion", "negative_prompt", "guidance", "steps"] and 1 <= answer["steps"] <= 3
    assert "negative_prompt &#39;" in (folder / "report.html").read_text()
