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


def test_the_merged_folder_writes_what_the_checkpoint_writes(run, ours, place, tmp_path):
    assert export.main(["--run", str(run), "--out", str(tmp_path / "out")]) == 0
    assert written(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), tmp_path / "out") == ours
    base = written(AutoModelForCausalLM.from_pretrained(place.policy), place.policy)
    assert len(set(ours)) > 1 and all(text != other for text, other in zip(ours, base, strict=True))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_adapters_on_their_base_write_what_the_checkpoint_writes(run, ours, place, tmp_path):
    peft = pytest.importorskip("peft", reason="needs the package peft (pip install peft)")
    assert export.main(["--run", str(run), "--out", str(tmp_path / "out"), "--adapters"]) == 0
    base = AutoModelForCausalLM.from_pretrained(place.policy)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    assert written(adapted, place.policy) == ours
