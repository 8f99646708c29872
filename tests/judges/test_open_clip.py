"""The scorer against open_clip itself: features, preprocessing, errors."""

import functools
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
open_clip = pytest.importorskip("open_clip")

from support import tiny_models  # noqa: E402
from support.vision.judged import pillow, smooth  # noqa: E402

from bridges import loading  # noqa: E402
from bridges.judges.open_clip import OpenClip  # noqa: E402
from grpo_jax.errors import UserError  # noqa: E402

TEXTS = ["a red dog", "two cats", "", "a " * 75 + "dog"]  # the last is longer than the window


def load_scorer(model, batch_size=32, **fields):
    scorer = OpenClip(model=str(model), **fields).load("cpu")
    scorer.batch_size = batch_size
    return scorer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def scorer(folder):
    return load_scorer(folder, batch_size=8)


@pytest.fixture(scope="module")
def reference(folder):
    name = f"local-dir:{folder}"
    model, transform = open_clip.create_model_from_pretrained(name)
    return model.eval(), transform, open_clip.get_tokenizer(name)


@pytest.mark.parametrize("shape", [(24, 24), (50, 33), (16, 20)])
def test_features_and_similarities_are_those_of_open_clip(scorer, reference, shape):
    """Resized or not: what has another size goes through open_clip's own transform."""
    model, transform, tokenizer = reference
    images = smooth(4, *shape)
    with torch.no_grad():
        image = model.encode_image(torch.stack([transform(pillow(x)) for x in images]), normalize=True)
        text = model.encode_text(tokenizer(TEXTS), normalize=True)
    torch.testing.assert_close(scorer.image_features(images), image, atol=1e-5, rtol=0)
    torch.testing.assert_close(scorer.text_features(TEXTS), text, atol=1e-5, rtol=0)
    torch.testing.assert_close(scorer.image_text(images, TEXTS), (image * text).sum(1), atol=1e-5, rtol=0)
    pairs = scorer.text_text(TEXTS, TEXTS[::-1])
    torch.testing.assert_close(pairs, (text * text.flip(0)).sum(1), atol=1e-5, rtol=0)
    torch.testing.assert_close(scorer.text_text(TEXTS, TEXTS), torch.ones(4))
    assert scorer.image_text(images, TEXTS).std() > 1e-4  # or the comparisons would show nothing


def test_the_plan_counts_its_weights(folder, scorer):
    weights = 4 * sum(parameter.numel() for parameter in scorer.model.parameters())
    for dtype, share in (("float32", 1), ("bfloat16", 2)):
        assert OpenClip(model=str(folder), dtype=dtype).memory()[0][1] == pytest.approx(weights / share, rel=1e-3)


def test_scores_do_not_depend_on_their_company(folder):
    images = smooth(11, 40, 40)
    texts = [f"dog {letter}" for letter in "abcdefghijk"]
    whole = load_scorer(folder, batch_size=4)
    together = whole.image_text(images, texts)
    order = [7, 2, 10, 0, 5, 1, 9, 3, 8, 6, 4]
    fresh = load_scorer(folder, batch_size=4)
    assert torch.equal(fresh.image_text(images[order], [texts[i] for i in order]), together[order])
    assert torch.equal(load_scorer(folder, batch_size=4).image_text(images[3:4], texts[3:4]), together[3:4])


def test_batches_side_by_side_score_as_one_at_a_time(folder, monkeypatch):
    images, texts = smooth(16, 24, 24), [f"dog {letter}" for letter in "abcdefghijklmnop"]
    alone = load_scorer(folder, batch_size=4).image_text(images, texts)
    pool, meeting = ThreadPoolExecutor(2), threading.Barrier(2)

    def wait(*_):
        meeting.wait(60)

    monkeypatch.setattr(loading, "_pool", lambda: (pool, 2))
    scorer = load_scorer(folder, batch_size=4)
    # Each batch waits for another: only two that run at the same time go on.
    scorer.model.visual.register_forward_pre_hook(wait)
    assert torch.equal(scorer.image_text(images, texts), alone)
    pool.shutdown()


def test_only_small_models_on_a_cpu_run_side_by_side(scorer, monkeypatch):
    """With one thread of torch each; others keep all threads for each product."""
    threads, cpu = torch.get_num_threads(), torch.device("cpu")
    monkeypatch.setattr(loading, "_pool", functools.cache(loading._pool.__wrapped__))
    torch.set_num_threads(3)
    try:
        large = torch.nn.Linear(2**13, 2**12, device="meta")
        assert loading.choose_workers(cpu, large) == loading.choose_workers(torch.device("cuda:0"), scorer.model) == 1
        assert torch.get_num_threads() == 3
        assert loading.choose_workers(cpu, scorer.model) == 3 and torch.get_num_threads() == 1
        assert [*loading.side_by_side(lambda _: torch.get_num_threads(), range(6), 3)] == [1] * 6
    finally:
        loading._pool()[0].shutdown()
        torch.set_num_threads(threads)


def test_equal_pictures_are_encoded_once(folder, monkeypatch):
    scorer = load_scorer(folder, batch_size=2)
    images = smooth(3, 24, 24)
    expected = scorer.image_features(images)
    batches = []
    encode = scorer.model.encode_image
    monkeypatch.setattr(scorer.model, "encode_image", lambda pixels: batches.append(len(pixels)) or encode(pixels))
    again = [2, 0, 2, 1, 0, 0, 2]
    torch.testing.assert_close(scorer.image_features(images[again]), expected[again], atol=0, rtol=0)
    assert batches == [2, 2]


def test_wrong_inputs(scorer):
    with pytest.raises(ValueError, match="images: expected float"):
        scorer.image_features(torch.zeros(3, 24, 24))
    with pytest.raises(ValueError, match=r"uint8"):
        scorer.image_features(torch.zeros(1, 3, 24, 24, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("model", "pretrained", "message"),
    [
        ("ViT-B-32", None, r"judges.scorer.pretrained: expected a safetensors file or weights of ViT-B-32, openai"),
        ("ViT-B/32", "nowhere", "expected a safetensors file or weights of ViT-B-32, openai.*, got 'nowhere'"),
        ("laion/some-model", None, "hf-hub:laion/some-model"),
        ("ViT-B-32", "laion2b_s34b_b79k", r"cannot load the scorer ViT-B-32 \(laion2b_s34b_b79k\)"),
    ],
)
def test_models_that_do_not_exist(model, pretrained, message):
    with pytest.raises(UserError, match=message) as caught:
        load_scorer(model, pretrained=pretrained)
    assert "\n" not in str(caught.value)


def test_weights_beside_a_model_that_has_its_own_are_refused(folder):
    """open_clip ignores them silently, so that pictures would be scored by other weights than named."""
    for model in ("miniature", str(folder), "hf-hub:laion/some-model"):
        with pytest.raises(UserError, match=r"judges.scorer.pretrained: expected null, as .* has its own weights, got"):
            OpenClip(model=model, pretrained="laion2b_s34b_b79k").check()


def test_broken_folders(tmp_path, folder):
    with pytest.raises(UserError, match=r"expected open_clip_config\.json and a safetensors"):
        load_scorer(tmp_path)
    copy = shutil.copytree(folder, tmp_path / "copy")
    weights = copy / "open_clip_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot load the scorer"):
        load_scorer(copy)
    shutil.copy(folder / weights.name, weights)
    config = json.loads((copy / "open_clip_config.json").read_text())
    config["model_cfg"]["vision_cfg"]["layers"] = 3
    (copy / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"cannot load the scorer .* Missing key"):
        load_scorer(copy)
    torch.save({}, copy / "open_clip_pytorch_model.bin")
    weights.unlink()
    with pytest.raises(UserError, match="and a safetensors file"):
        load_scorer(copy)
