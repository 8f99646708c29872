"""Pictures drawn from pictures: those of diffusers itself, from the picture of each row."""

import dataclasses
import json

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from PIL import Image  # noqa: E402
from support import tiny_models, tiny_pipelines  # noqa: E402
from support.vision.folders import seeing_folder  # noqa: E402

from bridges.renderers.image_to_image import ImageToImage  # noqa: E402
from grpo_jax.config import make_config  # noqa: E402
from grpo_jax.errors import UserError  # noqa: E402
from grpo_jax.rollout.data import Row  # noqa: E402
from grpo_jax.tasks.pictures import make_render, with_sources  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

MAKERS = {
    "StableDiffusionImg2ImgPipeline": tiny_pipelines.stable_diffusion,
    "StableDiffusionXLImg2ImgPipeline": tiny_pipelines.stable_diffusion_xl,
    "StableDiffusion3Img2ImgPipeline": tiny_models.stable_diffusion_3,
    "FluxImg2ImgPipeline": tiny_pipelines.flux,
    "FluxKontextPipeline": lambda folder: tiny_pipelines.flux(folder, kontext=True),
    "StableDiffusionInstructPix2PixPipeline": tiny_pipelines.instructed,
}
TEXTS, SEEDS = ["a red dog", "Two cats", "a red dog"], [3, 2**40, 3]


def picture(hue, size=(32, 32)):
    return Image.linear_gradient("L").resize(size).convert("RGB").point([v * hue // 255 for v in range(256)] * 3)


SOURCES = [picture(250), picture(120), picture(60)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: make(tmp_path_factory.mktemp(kind)) for kind, make in MAKERS.items()}


def judge_of(folder, **fields):
    shared = {"size": 32, "steps": 4, "eval_steps": 4, "batch_size": 2, "strength": 0.5}
    return ImageToImage(path=str(folder), **(shared | fields))


@pytest.mark.parametrize("kind", MAKERS)
def test_pictures_are_those_of_diffusers_from_the_same_picture_and_noise(kind, folders):
    guidance = 1.0 if kind.startswith("Flux") else 3.0
    renderer = judge_of(folders[kind], guidance=guidance).load("cpu")
    images = renderer.draw(TEXTS, SEEDS, evaluation=False, sources=SOURCES)
    assert images.shape == (3, 3, 32, 32) and type(renderer.pipeline).__name__ == kind
    parts = {"safety_checker": None} if kind in ("StableDiffusionImg2ImgPipeline",) else {}
    pipeline = getattr(diffusers, kind).from_pretrained(folders[kind], **parts)
    options = {"num_inference_steps": 4, "guidance_scale": guidance, "output_type": "pt"}
    if "Img2Img" in kind:
        options["strength"] = 0.5
    if kind == "FluxKontextPipeline":
        options |= {"height": 32, "width": 32, "max_area": 32 * 32, "_auto_resize": False}
    if kind in ("StableDiffusion3Img2ImgPipeline", "FluxImg2ImgPipeline"):
        options |= {"height": 32, "width": 32}
    for image, text, seed, source in zip(images, TEXTS, SEEDS, SOURCES, strict=True):
        expected = pipeline(prompt=text, image=source, generator=torch.Generator().manual_seed(seed), **options).images
        torch.testing.assert_close(image, expected[0], atol=1e-5, rtol=0)
    assert (images[0] - images[2]).abs().max() > 1e-4  # of the same words and noise, from another picture


def test_kept_pictures_are_told_apart_by_what_they_were_drawn_from(folders):
    renderer = judge_of(folders["StableDiffusionImg2ImgPipeline"]).load("cpu")
    first, second = (renderer.draw(["a"], [1], evaluation=False, sources=[source]) for source in SOURCES[:2])
    assert not torch.equal(first, second)
    again = renderer.draw(["a", "a"], [1, 1], evaluation=False, sources=[SOURCES[1].copy(), SOURCES[0].copy()])
    assert torch.equal(again, torch.cat([second, first]))


def test_a_picture_of_another_shape_gives_the_square_in_its_middle(folders):
    renderer = judge_of(folders["StableDiffusionImg2ImgPipeline"]).load("cpu")
    wide = Image.new("RGB", (96, 32), "blue")
    wide.paste(SOURCES[0], (32, 0))
    one, other = (renderer.draw(["a"], [1], evaluation=False, sources=[source]) for source in (wide, SOURCES[0]))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strength": 0.0}, "strength: expected a number above 0 and at most 1, got 0"),
        ({"strength": 0.2}, "strength 0.2 of 4 steps takes none: raise one of them"),
        ({"path": "./nowhere"}, r"no such folder: \./nowhere"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is_read(folders, fields, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(judge_of(folders["StableDiffusionImg2ImgPipeline"]), **fields).check()


def test_a_pipeline_that_draws_from_no_picture_is_refused(folders, tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "SanaPipeline"}))
    with pytest.raises(UserError, match="holds a SanaPipeline; the renderer needs a image-to-image pipeline"):
        judge_of(tmp_path).check()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(7, "a"), "row 7: expected one picture, which is to be drawn from, got 0"),
        (Row(7, "a", {}, (SOURCES[0], SOURCES[1])), "row 7: expected one picture, .* got 2"),
        (Row(7, "a", {"source_image": 1}, (SOURCES[0],)), "row 7: the column source_image is the row's picture"),
        (Row(7, "a", {}, (b"none",)), "row 7, picture: it is no picture that can be read"),
    ],
)
def test_rows_without_their_picture_are_refused(row, message):
    with pytest.raises(UserError, match=message) as caught:
        with_sources([row], seen=False)
    assert "\n" not in str(caught.value)


def test_a_task_that_draws_from_texts_alone_says_so():
    with pytest.raises(UserError, match=r"judges\.renderer\.kind: expected one that draws from texts alone"):
        make_config(task="prompt_recreation", judges={"renderer": {"kind": "image_to_image"}})
    with pytest.raises(
        UserError, match=r"task\.see_source: expected false with a renderer that draws from texts alone"
    ):
        make_config(task={"kind": "prompt_enhancement", "see_source": True})


def test_every_text_and_the_unchanged_prompt_get_the_rows_picture():
    calls = []

    class Renderer:
        device, takes_pictures = "cpu", True

        def draw(self, texts, seeds, *, evaluation, sources, settings=None):
            calls.append(list(zip(texts, [source.getpixel((0, 31)) for source in sources], strict=True)))
            return torch.zeros(len(texts), 3, 2, 2)

    config = make_config(task={"kind": "prompt_enhancement", "pictures_per_text": 2})
    rows = with_sources([Row(1, "p", {}, (SOURCES[0],)), Row(2, "q", {}, (SOURCES[1],))], seen=False)
    assert all(row.pictures == () for row in rows)
    make_render({"renderer": Renderer()}, config, baselines=True)(rows, [["a", "b"], ["c", "d"]], 0, False)
    p, q = (source.getpixel((0, 31)) for source in SOURCES[:2])
    assert p != q
    assert calls[0] == [("a", p), ("b", p), ("c", q), ("d", q)] * 2
    assert calls[1] == [("p", p), ("q", q)] * 2
    with pytest.raises(UserError, match=r"row 3: judges\.renderer draws from a picture, and there is none"):
        make_render({"renderer": Renderer()}, config, baselines=False)([Row(3, "p")], [["a"]], 0, False)


@pytest.mark.parametrize("seen", [False, True])
def test_the_command_trains_on_rows_with_a_picture(seen, folders, tmp_path, capsys):
    pytest.importorskip("open_clip")
    from grpo_jax.train import main

    lines = []
    for number in range(10):
        picture(60 + 19 * number).save(tmp_path / f"{number}.png")
        lines.append({"prompt": f"make it {number}", "image": f"{number}.png"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {
        "task": "prompt_enhancement", "data.prompts": tmp_path / "rows.jsonl", "data.held_out": 0.2,
        "judges.renderer.kind": "image_to_image", "judges.renderer.path": folders["StableDiffusionImg2ImgPipeline"],
        "judges.renderer.size": 32, "judges.renderer.steps": 2, "judges.renderer.eval_steps": 2,
        "rewards": "[alignment_gain]", "watch": "[]", "sampling.group_size": 4, "sampling.max_new_tokens": 12,
        "training.prompts_per_batch": 2, "training.max_steps": 2, "evaluation.every": 0, "evaluation.gallery": 2,
        "evaluation.sampled": "false", "report_to": "[]", "run_dir": tmp_path / "run",
    }  # fmt: skip
    if seen:
        values |= {"task.see_source": "true", "policy.path": seeing_folder(tmp_path / "policy")}
    assert main([f"--{name}={value}" for name, value in values.items()]) == 0
    assert ("a frozen vision tower" in (tmp_path / "run" / "train.log").read_text()) == seen
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("reward/alignment_gain/mean" in step for step in steps)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps(lines[1]) + "\n")
    values |= {"run_dir": tmp_path / "other", "data.held_out": 0}
    capsys.readouterr()
    assert main([f"--{name}={value}" for name, value in values.items()]) != 0
    assert "row 1: expected one picture, which is to be drawn from, got 0" in capsys.readouterr().err
