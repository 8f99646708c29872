"""Policy folders, valid ones mutated: they load and run forward once, or are refused in one line; no code runs.

A folder may ask for code (`auto_map`), hold pickles, or break any of its files. Executed code would leave a trace.
"""

import contextlib
import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from faults.fuzz.mutations import entry, mutated_bytes, odd_value, places, tried
from faults.outcome import Outcome
from support.encoded_prompts import plain_rows
from support.folders import load_folder
from support.tiny_models import causal_lm

from grpo_jax.config.sections import DataSection, NewPolicySection
from grpo_jax.models.hf.chat import special_ids
from grpo_jax.models.policy import Policy
from grpo_jax.models.random_init import write_policy
from grpo_jax.rollout.encoding import as_is, make_decode, make_encode

TEXTS = (
    "config.json",
    "config.json",
    "config.json",
    "tokenizer.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "model.safetensors.index.json",
)
TEMPLATES = (
    "{% for m in messages %}",
    "{{ raise_exception('no') }}",
    "{{ ''.__class__.__mro__ }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "",
    "  ",
    "{{ messages }}",
    "{{ messages[1]['content'] }}",
    "{{ messages[0]['content'] | upper }}",
    "{{ messages[0]['content'] | trim }}<|im_end|>",
    "{{ bos_token + eos_token }}",
    "plain",
)


def campaign(folder: Path, seed: int, count: int) -> Iterator[Outcome]:
    """Loads `count` mutated folders, one outcome each."""
    rng, trace = random.Random(seed), folder / "code_ran"
    marked = [_causal(folder / "qwen2", "qwen2"), _causal(folder / "shards", "llama", max_shard_size="20KB")]
    small = NewPolicySection(width=8, layers=1, heads=2, window=32)
    sources = [*marked, write_policy(folder / "new", ["a", "red", "fox"], small)]
    programs: dict[Any, Callable[..., Any]] = {}
    for number in range(count):
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        source = rng.choice(sources)
        shutil.copytree(source, work)
        case = f"{seed}/{number} {source.name}: {_damaged(rng, work, trace)}"
        outcome = tried(case, lambda work=work, marked=source in marked: _used(work, programs, marked), folder)
        if trace.exists():
            trace.unlink()
            outcome = Outcome(case, False, note="code of the folder ran")
        yield outcome


def _causal(folder: Path, architecture: str, **named: Any) -> Path:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    return causal_lm(folder, architecture, **sizes, **named)


def _used(folder: Path, programs: dict[Any, Callable[..., Any]], marked: bool) -> None:
    """What a run does with a policy: prompts to tokens, one pass forward, tokens back to text."""
    loaded = load_folder(folder)
    section = DataSection(max_prompt_tokens=4096)
    encode = make_encode(loaded.tokenizer, section, pad_id=loaded.pad_id, vocab_size=loaded.config.vocab_size)
    marks = special_ids(loaded.tokenizer)
    names = " ".join(map(str, loaded.tokenizer.convert_ids_to_tokens(sorted(marks))))
    tokens, mask, _ = encode(plain_rows(["a red fox", f"fox {names}"]))
    if marked:  # not of whole words, to which the texts of marks are unknown ones
        usual, odd = ([token for token in row[real] if token in marks] for row, real in zip(tokens, mask, strict=True))
        assert usual == odd, (usual, odd)
    if loaded.config not in programs:
        policy = Policy(loaded.config)
        programs[loaded.config] = lambda params, *batch: jax.eval_shape(policy.prefill, {"params": params}, *batch)
    hidden = programs[loaded.config](loaded.params, tokens, mask).hidden
    assert hidden.shape[-1] == loaded.config.hidden_size
    make_decode(loaded.tokenizer, DataSection(), read=as_is)(np.arange(3), "a fox")


def _damaged(rng: random.Random, folder: Path, trace: Path) -> str:
    """Does something to a folder; says what."""
    said = [rng.choice((_field, _field, _bytes, _missing, _header, _code, _template))(rng, folder, trace)]
    while rng.random() < 0.2:
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError, RecursionError):  # broken or gone already
            said.append(rng.choice((_field, _bytes, _template))(rng, folder, trace))
    return "; ".join(said)


def _texts(rng: random.Random, folder: Path) -> Path | None:
    name = rng.choice(TEXTS)
    return folder / name if (folder / name).is_file() else None


def _field(rng: random.Random, folder: Path, trace: Path) -> str:
    """Another value, or none, somewhere in a JSON file."""
    path = _texts(rng, folder) or folder / "config.json"
    content = json.loads(path.read_text())
    found = places(content)
    *outer, key = rng.choice(found[:200] if rng.random() < 0.7 else found)
    inner = entry(content, outer)
    if isinstance(inner, dict) and rng.random() < 0.2:
        del inner[key]
    else:
        inner[key] = odd_value(rng)
    path.write_bytes(json.dumps(content).encode("utf-8", "surrogatepass"))
    return f"{path.name} {key!r} {str(inner.get(key) if isinstance(inner, dict) else '')[:40]!r}"


def _bytes(rng: random.Random, folder: Path, trace: Path) -> str:
    path = _texts(rng, folder) or rng.choice(sorted(folder.glob("*.safetensors")) or [folder / "config.json"])
    path.write_bytes(mutated_bytes(rng, path.read_bytes()))
    return f"bytes of {path.name}"


def _missing(rng: random.Random, folder: Path, trace: Path) -> str:
    path = rng.choice(sorted(folder.iterdir()))
    path.unlink()
    if rng.random() < 0.3:
        path.mkdir()
    elif rng.random() < 0.3:
        path.write_bytes(b"")
    return f"no {path.name}"


def _header(rng: random.Random, folder: Path, trace: Path) -> str:
    """A safetensors header that lies."""
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = rng.choice([name for name in header if name != "__metadata__"])
    how = rng.choice(["dtype", "shape", "data_offsets", "name", "size", "metadata", "value"])
    if how == "value":
        start = 8 + size + header[name]["data_offsets"][0]
        data = data[:start] + np.float32(rng.choice([np.nan, np.inf, 1e38])).tobytes() + data[start + 4 :]
        path.write_bytes(data)
        return f"{name} not finite"
    if how == "dtype":
        header[name]["dtype"] = rng.choice(["F64", "I32", "BF16", "F8_E4M3", "X", odd_value(rng, 9)])
    elif how == "shape":
        header[name]["shape"] = rng.choice([[], [0], [2**62, 4], [-1], "x", [1] * 40, odd_value(rng)])
    elif how == "data_offsets":
        header[name]["data_offsets"] = rng.choice([[0, 0], [0, 2**62], [8, 4], [-1, 1], odd_value(rng)])
    elif how == "name":
        header[str(odd_value(rng, 9))] = header.pop(name)
    elif how == "metadata":
        header["__metadata__"] = rng.choice([{}, {"format": "tf"}, {"x": "y" * 10_000}, odd_value(rng)])
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    length = rng.choice([0, 2**63, 2**64 - 1, len(text) + 5]) if how == "size" else len(text)
    path.write_bytes(length.to_bytes(8, "little") + text + data[8 + size :])
    return f"header: {how} of {name}"


class _Trace:
    """Leaves a trace where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def _code(rng: random.Random, folder: Path, trace: Path) -> str:
    """Files that hold code or pickles, and fields that ask for them."""
    for name in ("modeling_own.py", "tokenization_own.py", "configuration_own.py"):
        (folder / name).write_text(f"open({str(trace)!r}, 'w').close()\nclass Own: pass\n")
    for name in ("pytorch_model.bin", "training_args.bin", "model.pkl", "tokenizer.pkl"):
        (folder / name).write_bytes(pickle.dumps(_Trace(trace)))
    table = {
        "AutoConfig": "configuration_own.Own",
        "AutoModelForCausalLM": "modeling_own.Own",
        "AutoTokenizer": ["tokenization_own.Own", "tokenization_own.Own"],
    }
    for name in rng.sample(["config.json", "tokenizer_config.json"], rng.choice([1, 2])):
        content = json.loads((folder / name).read_text())
        content["auto_map"] = table if name == "config.json" else {"AutoTokenizer": table["AutoTokenizer"]}
        content["trust_remote_code"] = True
        content["tokenizer_class"] = rng.choice(["Own", "PreTrainedTokenizerFast", "GPT2Tokenizer", "os.system", 7])
        (folder / name).write_text(json.dumps(content))
    if rng.random() < 0.3:
        for path in folder.glob("*.safetensors"):
            path.unlink()
    if rng.random() < 0.3:
        (folder / "tokenizer.json").unlink()
    return "code"


def _template(rng: random.Random, folder: Path, trace: Path) -> str:
    template = rng.choice(TEMPLATES)
    if rng.random() < 0.5:
        (folder / "chat_template.jinja").write_text(template)
        return f"chat_template.jinja {template!r}"
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text())
    content["chat_template"] = rng.choice([template, odd_value(rng), [{"name": "default", "template": template}]])
    path.write_bytes(json.dumps(content).encode("utf-8", "surrogatepass"))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return "chat_template"
