"""What a run with adapters exports writes greedily, in transformers and PEFT, what our sampler writes from it."""

import pytest

pytest.importorskip("torch")
from support.text_task import train_here
from support.torch_reference import greedy_answers
from transformers import AutoModelForCausalLM

from grpo_jax import export, load_rewriter

SYSTEM, PROMPTS = "Be brief.", ["a tree", "ümläut\non two lines"]


@pytest.fixture(scope="module")
def run(place, tmp_path_factory):
    """A quick iteration with adapters that change what is written, but not to one text whatever the processor."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    adapters = ["--policy.lora.rank=2", "--policy.lora.alpha=64", "--optimizer.learning_rate=0.001"]
    short = ["--training.max_steps=1", "--evaluation.every=0", "--optimizer.warmup_steps=0", "--data.held_out=0"]
    assert train_here(place.config, folder, f"--data.system_prompt={SYSTEM}", *adapters, *short) == 0
    return folder


@pytest.fixture(scope="module")
def ours(run):
    """By our sampler from the checkpoint."""
    rewrite = load_rewriter(run, "final")
    return [rewrite(prompt) for prompt in PROMPTS]


def written(model, folder):
    system = [{"role": "system", "content": SYSTEM}]
    return greedy_answers(model, folder, PROMPTS, system=system, max_new_tokens=8)


@pytest.fixture(scope="module")
def base(place):
    return written(AutoModelForCausalLM.from_pretrained(place.policy), place.policy)


def test_the_merged_folder_writes_what_the_checkpoint_writes(run, ours, base, tmp_path):
    assert export.main(["--run", str(run), "--out", str(tmp_path / "out")]) == 0
    assert written(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), tmp_path / "out") == ours
    assert len(set(ours)) > 1 and all(text != other for text, other in zip(ours, base, strict=True))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_on_one_base_each_write_what_their_checkpoint_writes(run, ours, base, place, tmp_path):
    peft = pytest.importorskip("peft", reason="needs the package peft (pip install peft)")
    for checkpoint in ("start", "final"):
        out = str(tmp_path / checkpoint)
        assert export.main(["--run", str(run), "--out", out, "--checkpoint", checkpoint, "--adapters"]) == 0
    model = AutoModelForCausalLM.from_pretrained(place.policy)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "final", adapter_name="final")
    assert written(model, place.policy) == ours
    model.load_adapter(tmp_path / "start", adapter_name="start")
    for adapter, expected in {"start": base, "final": ours}.items():  # switched, never merged
        model.set_adapter(adapter)
        assert written(model, place.policy) == expected
