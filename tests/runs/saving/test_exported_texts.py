"""What a run with adapters exports writes greedily, in transformers and PEFT, what our sampler writes from it."""

import json

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402
from support.text_task import train_here  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from grpo_jax import export, generate, load_policy, load_rewriter  # noqa: E402

SYSTEM, PROMPTS = "Be brief.", ["a tree", "q", "Seven ducks on a pond!", "ümläut", "two\nlines"]
TOKENS = 8


@pytest.fixture(scope="module")
def run(place, tmp_path_factory):
    """A quick iteration with adapters that change what is written."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    adapters = ["--policy.lora.rank=2", "--policy.lora.alpha=64", "--optimizer.learning_rate=0.1"]
    short = ["--training.max_steps=1", "--evaluation.every=0", "--optimizer.warmup_steps=0"]
    assert train_here(place.config, folder, f"--data.system_prompt={SYSTEM}", *adapters, *short) == 0
    return folder


@pytest.fixture(scope="module")
def ours(run):
    """By our sampler from the checkpoint."""
    rewrite = load_rewriter(run, "final")
    return [rewrite(prompt) for prompt in PROMPTS]


def written(model, folder, system=({"role": "system", "content": SYSTEM},)):
    """By transformers, through the chat template of a folder."""
    tokenizer, texts = AutoTokenizer.from_pretrained(folder), []
    for prompt in PROMPTS:
        said = [*system, {"role": "user", "content": prompt}]
        asked = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            out = model.generate(**asked, max_new_tokens=TOKENS, do_sample=False)
        texts.append(tokenizer.decode(out[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def test_the_merged_folder_writes_what_the_checkpoint_writes(run, ours, place, tmp_path):
    assert export.main(["--run", str(run), "--out", str(tmp_path / "out")]) == 0
    assert written(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), tmp_path / "out") == ours
    base = written(AutoModelForCausalLM.from_pretrained(place.policy), place.policy)
    assert len(set(ours)) > 1 and all(text != other for text, other in zip(ours, base, strict=True))


def test_the_rounded_folder_is_the_merged_one_and_writes_the_same_in_both_libraries(run, tmp_path):
    """Its weights are other ones, by a rounding: what is likeliest by little may be another token than the run's."""
    out = tmp_path / "out"
    assert export.main(["--run", str(run), "--out", str(out), "--dtype", "bfloat16"]) == 0
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    asked_alone = [[text] for text in written(model, out, system=())]
    assert generate(load_policy(out), PROMPTS, max_new_tokens=TOKENS) == asked_alone
    full, rounded = (load_file(folder / "model.safetensors") for folder in (run / "policy", out))
    assert full.keys() == rounded.keys()
    assert all(torch.equal(rounded[name], full[name].bfloat16()) for name in full)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_adapters_on_their_base_write_what_the_checkpoint_writes(run, ours, place, tmp_path):
    peft = pytest.importorskip("peft", reason="needs the package peft (pip install peft)")
    assert export.main(["--run", str(run), "--out", str(tmp_path / "out"), "--adapters"]) == 0
    base = AutoModelForCausalLM.from_pretrained(place.policy)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    assert written(adapted, place.policy) == ours
