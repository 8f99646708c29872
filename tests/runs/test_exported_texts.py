"""What a run with adapters exports writes greedily, in transformers and PEFT, what our sampler writes from it."""

import pytest

pytest.importorskip("torch")
from support.text_task import train_here
from support.torch_reference import greedy_answers
from transformers import AutoModelForCausalLM

from grpo_jax import export, load_rewriter

SYSTEM, PROMPTS = "Be brief.", ["a tree", "ümläut\non two lines"]


def written(model, folder):
    system = [{"role": "system", "content": SYSTEM}]
    return greedy_answers(model, folder, PROMPTS, system=system, max_new_tokens=8)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_exported_folders_and_adapters_write_what_their_checkpoint_writes(place, tmp_path):
    """A quick iteration with adapters that change what is written, but not to one text whatever the processor."""
    peft = pytest.importorskip("peft", reason="needs the package peft (pip install peft)")
    run = tmp_path / "run"
    adapters = ["--policy.lora.rank=2", "--policy.lora.alpha=64", "--optimizer.learning_rate=0.001"]
    short = ["--training.max_steps=1", "--evaluation.every=0", "--optimizer.warmup_steps=0", "--data.held_out=0"]
    assert train_here(place.config, run, f"--data.system_prompt={SYSTEM}", *adapters, *short) == 0
    rewrite = load_rewriter(run, "final")
    ours = [rewrite(prompt) for prompt in PROMPTS]
    base = written(AutoModelForCausalLM.from_pretrained(place.policy), place.policy)
    assert len(set(ours)) > 1 and all(text != other for text, other in zip(ours, base, strict=True))
    assert written(AutoModelForCausalLM.from_pretrained(run / "policy"), run / "policy") == ours
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
