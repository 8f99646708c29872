"""sentence-transformers as the encoder, by a tiny random model."""

import importlib.util
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bridges.retrieval import encoders
from grpo_jax.errors import UserError

# Not imported by each worker that collects this file: it is the largest import of all.
installed = importlib.util.find_spec("sentence_transformers") is not None
pytestmark = pytest.mark.skipif(not installed, reason="needs sentence_transformers")

WORDS = ["red", "blue", "rose", "nail", "polish", "hand", "cream", "soap", "brush", "night"]
TITLES = [f"{a} {b}" for a in WORDS for b in WORDS if a != b]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT of one layer with random weights, mean pooling on top."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    path = tmp_path_factory.mktemp("sentence")
    (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    torch.manual_seed(0)
    config = BertConfig(vocab_size=15, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertModel(config).save_pretrained(path / "bert")
    BertTokenizerFast(str(path / "vocab.txt")).save_pretrained(path / "bert")
    word = Transformer(str(path / "bert"))
    model = SentenceTransformer(modules=[word, Pooling(16, pooling_mode="mean")])
    model.save(str(path / "model"))
    return path / "model"


@pytest.fixture(scope="module")
def encoder(folder):
    return encoders.load_encoder(str(folder), TITLES)


def test_vectors_are_the_normalised_means_of_the_states(encoder, folder):
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    texts = ["red nail polish", "soap", "night cream brush hand"]
    found = encoder.encode(texts)
    for text, vector in zip(texts, found, strict=True):
        with torch.no_grad():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)
    assert found.dtype == np.float32


def test_blank_texts_say_nothing(encoder):
    found = encoder.encode(["", "red", " \n"])
    assert not found[0].any() and found[1].any() and not found[2].any()
    assert not encoder.encode(["", ""]).any()


def test_the_identity_is_that_of_the_weights_and_not_of_the_place(encoder, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    copy = encoders.load_encoder(str(tmp_path / "copy"), TITLES)
    assert copy.identity == encoder.identity
    from safetensors.torch import load_file, save_file

    (weights,) = (tmp_path / "copy").rglob("*.safetensors")
    tensors = load_file(weights)
    tensors["embeddings.word_embeddings.weight"][5, 0] += 1
    save_file(tensors, weights, metadata={"format": "pt"})
    assert encoders.load_encoder(str(tmp_path / "copy"), TITLES).identity != encoder.identity


def test_a_prompt_before_every_text_is_part_of_the_identity(encoder, folder, tmp_path):
    """Cached vectors of titles would otherwise meet queries with another prompt."""
    asked = shutil.copytree(folder, tmp_path / "asked")
    settings = asked / "config_sentence_transformers.json"
    prompts = {"prompts": {"query": "red soap "}, "default_prompt_name": "query"}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | prompts))
    other = encoders.load_encoder(str(asked), TITLES)
    assert not np.allclose(other.encode(["nail"]), encoder.encode(["nail"]))
    assert other.identity != encoder.identity


def test_unknown_models_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no such folder: \./nowhere"):
        encoders.load_encoder("./nowhere", TITLES)
    with pytest.raises(UserError, match=r"cannot load the encoder .*: Unrecognized model"):
        encoders.load_encoder(str(tmp_path), TITLES)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="cannot load the encoder"):
        encoders.load_encoder(str(tmp_path), TITLES)


def test_code_and_pickles_in_a_folder_are_not_run(folder, tmp_path):
    evil = shutil.copytree(folder, tmp_path / "evil")
    (evil / "own.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')\nclass Own: pass\n")
    modules = json.loads((evil / "modules.json").read_text())
    (evil / "modules.json").write_text(json.dumps([*modules, {"idx": 9, "name": "9", "path": "", "type": "own.Own"}]))
    with pytest.raises(UserError, match=r"code of its own \(own\.Own\), which is not run"):
        encoders.load_encoder(str(evil), TITLES)
    assert not (tmp_path / "trace").exists()
    pickled = shutil.copytree(folder, tmp_path / "pickled")
    (weights,) = pickled.rglob("model.safetensors")
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    with pytest.raises(UserError, match="cannot load the encoder"):
        encoders.load_encoder(str(pickled), TITLES)
