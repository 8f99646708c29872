"""Any pipeline of diffusers as a judge: pictures, windows and weights equal those of diffusers."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from support import tiny_models, tiny_pipelines  # noqa: E402

from bridges import loading  # noqa: E402
from bridges.diffusion import denoiser  # noqa: E402
from bridges.judges.text_to_image import TextToImage  # noqa: E402
from grpo_jax.config.command_line import parse  # noqa: E402
from grpo_jax.errors import UserError  # noqa: E402

# torch's arrays and NumPy 2, inside diffusers' schedulers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

MAKERS = {
    "StableDiffusionPipeline": tiny_pipelines.stable_diffusion,
    "StableDiffusionXLPipeline": tiny_pipelines.stable_diffusion_xl,
    "StableDiffusion3Pipeline": tiny_models.stable_diffusion_3,
    "FluxPipeline": tiny_pipelines.flux,
    "SanaPipeline": tiny_pipelines.sana,
    "PixArtSigmaPipeline": tiny_pipelines.pixart_sigma,
}
FIXED_WINDOW = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
PROMPTS, SEEDS = ["a red dog", "Two cats", "a dog of red"], [3, 2**40, 5]

each_kind = pytest.mark.parametrize("kind", MAKERS)
some_kinds = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.wide] * (kind not in ("StableDiffusionXLPipeline", "FluxPipeline")))
        for kind in MAKERS
    ],
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A pipeline of each kind."""
    return {kind: make(tmp_path_factory.mktemp(kind)) for kind, make in MAKERS.items()}


@pytest.fixture(scope="module")
def judges(folders):
    return {kind: judge_of(kind, folder) for kind, folder in folders.items()}


@pytest.fixture(scope="module")
def load(judges):
    """load(kind) → what it loads, once."""
    loaded = {}

    def load_once(kind):
        if kind not in loaded:
            loaded[kind] = judges[kind].load("cpu")
        return loaded[kind]

    return load_once


def judge_of(kind, folder, **fields) -> TextToImage:
    """A judge of two steps that guides in training and does not in evaluation, nor ever where it cannot."""
    shared = {"size": 32, "steps": 2, "eval_steps": 2, "batch_size": 4, "cache_megabytes": 0}
    guided = {"eval_guidance": 1.0} if kind == "FluxPipeline" else {"guidance": 3.0, "eval_guidance": 1.0}
    # more than CLIP's 77, so that Stable Diffusion 3's T5 reads furthest
    length = {} if kind in FIXED_WINDOW else {"max_sequence_length": 80}
    return TextToImage(path=str(folder), **(shared | guided | length | fields))


def of_diffusers(kind, folder, **parts):
    """The pipeline as one loads it without us."""
    if kind == "StableDiffusionPipeline":
        parts |= {"safety_checker": None, "requires_safety_checker": False}
    pipeline = getattr(diffusers, kind).from_pretrained(folder, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def call(pipeline, prompts, seeds, **options):
    """Pictures from explicit latents, each drawn on the CPU from its seed alone."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    latents = torch.cat([torch.randn((1, 4, 16, 16), generator=generator) for generator in generators])
    kind = type(pipeline).__name__
    if kind == "FluxPipeline":
        latents = pipeline._pack_latents(latents, len(seeds), 4, 16, 16)
    if kind in ("SanaPipeline", "PixArtSigmaPipeline"):
        options |= {"use_resolution_binning": False, "clean_caption": False}
    if kind not in FIXED_WINDOW:
        options |= {"max_sequence_length": 80}
    return pipeline(
        prompts,
        latents=latents,
        generator=generators,  # for what an ancestral scheduler adds
        num_inference_steps=2,
        height=32,
        width=32,
        output_type="pt",
        **options,
    ).images


@each_kind
def test_pictures_are_those_of_diffusers_from_the_same_latents(kind, folders, load):
    renderer, pipeline = load(kind), of_diffusers(kind, folders[kind])
    for evaluation, guidance in ((False, 3.0), (True, 1.0)):
        images = renderer.draw(PROMPTS, SEEDS, evaluation=evaluation)
        assert images.shape == (3, 3, 32, 32) and images.dtype == torch.float32
        expected = call(pipeline, PROMPTS, SEEDS, guidance_scale=guidance)
        torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)
        assert (images[0] - images[2]).abs().max() > 1e-3  # or the comparison would show nothing


@pytest.mark.parametrize(
    ("config", "kind", "window"),
    [
        ("prompt_enhancement_sdxl_turbo", "StableDiffusionXLPipeline", 77),
        ("prompt_enhancement_flux_schnell", "FluxPipeline", 256),
    ],
)
def test_a_shipped_config_draws(config, kind, window, folders):
    small = [f"--judges.renderer.path={folders[kind]}", "--judges.renderer.size=32", "--judges.renderer.batch_size=2"]
    judge = parse([f"--config={config}", *small]).judges["renderer"]
    judge.check()
    renderer = judge.load("cpu")
    assert f": {kind}, 4 steps, window {window} tokens" in str(renderer)
    images = renderer.draw(["a red dog", "two cats"], [1, 1], evaluation=True)
    assert images.shape == (2, 3, 32, 32) and torch.isfinite(images).all()
    assert renderer.pipeline.vae.dtype == torch.bfloat16


@some_kinds
def test_a_picture_does_not_depend_on_its_company(kind, load):
    renderer = load(kind)
    prompts, seeds = [f"dog {letter}" for letter in "abcd"], [1, 2, 1, 2]
    together = renderer.draw(prompts, seeds, evaluation=False)
    order = [3, 1, 0, 2]
    shuffled = renderer.draw([prompts[i] for i in order], [seeds[i] for i in order], evaluation=False)
    assert torch.equal(shuffled, together[order])
    torch.manual_seed(99)
    assert torch.equal(renderer.draw(prompts[2:3], seeds[2:3], evaluation=False), together[2:3])


@some_kinds
def test_two_batches_side_by_side_draw_the_pictures_of_one_at_a_time(kind, folders, monkeypatch):
    prompts, seeds = [f"dog {letter}" for letter in "abcdefgh"], list(range(8))
    alone = judge_of(kind, folders[kind], batch_size=2).load("cpu").draw(prompts, seeds, evaluation=False)
    pool, meeting = ThreadPoolExecutor(2), threading.Barrier(2)

    def wait(*_):
        meeting.wait(60)

    monkeypatch.setattr(loading, "_pool", lambda: (pool, 2))
    renderer = judge_of(kind, folders[kind], batch_size=2).load("cpu")
    # Each pass waits for that of another batch: only two that run at the same time go on.
    denoiser(renderer.pipeline).register_forward_pre_hook(wait)
    assert torch.equal(renderer.draw(prompts, seeds, evaluation=False), alone)
    pool.shutdown()


@some_kinds
def test_the_window_is_where_words_stop_to_reach_the_picture(kind, load):
    renderer = load(kind)
    assert renderer.window == (77 if kind in FIXED_WINDOW else 80)
    words = "xx " + "a b c d e f g h " * 20
    texts = [words[:end] for end in range(1, len(words)) if words[end - 1] != " "]
    (inside,) = [t for t, count in zip(texts, renderer.count_tokens(texts), strict=True) if count == renderer.window]
    last = -3 if kind == "SanaPipeline" else -1  # it leaves room for a piece that a tokenizer of words lacks
    prompts = [inside, inside + " red dog", inside[:last] + "x" + inside[len(inside) + last + 1 :]]
    assert [count > renderer.window for count in renderer.count_tokens(prompts)] == [False, True, False]
    images = renderer.draw(prompts, [1, 1, 1], evaluation=False)
    torch.testing.assert_close(images[0], images[1], atol=1e-5, rtol=0)
    assert (images[0] - images[2]).abs().max() > 1e-4


def test_the_window_of_a_pipeline_is_its_own_unless_the_config_says_otherwise(folders):
    windows = {"StableDiffusion3Pipeline": 256, "FluxPipeline": 512, "SanaPipeline": 300, "PixArtSigmaPipeline": 300}
    for kind, window in windows.items():
        assert judge_of(kind, folders[kind], max_sequence_length=0, guidance=1.0).load("cpu").window == window


def test_what_paints_over_pictures_is_left_out(load, folders):
    pipeline = load("StableDiffusionPipeline").pipeline
    assert (folders["StableDiffusionPipeline"] / "safety_checker").is_dir() and pipeline.safety_checker is None
    assert load("StableDiffusionXLPipeline").pipeline.watermark is None


def test_a_negative_prompt_is_that_of_diffusers(folders, load):
    for kind in ("StableDiffusionXLPipeline", "StableDiffusion3Pipeline", "PixArtSigmaPipeline"):
        renderer = judge_of(kind, folders[kind], negative_prompt="cats", eval_guidance=3.0).load("cpu")
        images = renderer.draw(PROMPTS, SEEDS, evaluation=False)
        pipeline, negative = of_diffusers(kind, folders[kind]), ["cats"] * 3
        expected = call(pipeline, PROMPTS, SEEDS, guidance_scale=3.0, negative_prompt=negative)
        torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)
        assert (images - load(kind).draw(PROMPTS, SEEDS, evaluation=False)).abs().max() > 1e-4


def test_guidance_that_is_an_input_of_the_network(tmp_path):
    """FLUX.1 dev's, where schnell has none."""
    folder = tiny_pipelines.flux(tmp_path, guidance_embeds=True)
    with pytest.raises(UserError, match=r"negative_prompt: expected none, as .* reads none"):
        judge_of("FluxPipeline", folder, guidance=3.5, eval_guidance=2.0, negative_prompt="cats").load("cpu")
    renderer = judge_of("FluxPipeline", folder, guidance=3.5).load("cpu")
    images = renderer.draw(PROMPTS, SEEDS, evaluation=False)
    expected = call(of_diffusers("FluxPipeline", folder), PROMPTS, SEEDS, guidance_scale=3.5)
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)
    assert (images - renderer.draw(PROMPTS, SEEDS, evaluation=True)).abs().max() > 1e-4


@pytest.mark.skipif(not hasattr(diffusers, "ZImagePipeline"), reason="an older diffusers")
def test_guidance_of_1_is_off_where_the_pipeline_guides_at_1(tmp_path):
    """Z-Image, whose network and pipeline name no size either."""
    folder = tiny_pipelines.z_image(tmp_path)
    with pytest.raises(UserError, match="size: expected the pixels of a side, as a ZImagePipeline names none"):
        judge_of("ZImagePipeline", folder, size=0).load("cpu")
    renderer, pipeline = judge_of("ZImagePipeline", folder).load("cpu"), of_diffusers("ZImagePipeline", folder)
    for evaluation, guidance in ((False, 3.0), (True, 0.0)):
        images = renderer.draw(PROMPTS, SEEDS, evaluation=evaluation)
        expected = call(pipeline, PROMPTS, SEEDS, guidance_scale=guidance)
        torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)
    assert (expected - call(pipeline, PROMPTS, SEEDS, guidance_scale=1.0)).abs().max() > 1e-3


def lora_of(kind, folder, out):
    """Random LoRA weights of rank 2 for the attention of what draws and of CLIP, as diffusers saves them."""
    from peft import LoraConfig, get_peft_model_state_dict

    torch.manual_seed(1)
    pipeline = of_diffusers(kind, folder)
    network = "transformer" if hasattr(pipeline, "transformer") else "unet"
    targets = {network: ["to_q", "to_v"]} | ({} if kind == "SanaPipeline" else {"text_encoder": ["q_proj"]})
    weights = {}
    for name, modules in targets.items():
        model = getattr(pipeline, name)
        model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=modules, init_lora_weights=False))
        weights[f"{name}_lora_layers"] = get_peft_model_state_dict(model)
    type(pipeline).save_lora_weights(out, **weights, safe_serialization=True)
    return out


@pytest.mark.parametrize("kind", ["StableDiffusionXLPipeline", "FluxPipeline", "SanaPipeline"])
def test_lora_weights_are_those_of_diffusers(kind, folders, load, tmp_path):
    pytest.importorskip("peft")
    lora = lora_of(kind, folders[kind], tmp_path)
    judge = judge_of(kind, folders[kind], lora=str(lora))
    judge.check()
    renderer, pipeline = judge.load("cpu"), of_diffusers(kind, folders[kind])
    pipeline.load_lora_weights(lora, adapter_name="ours")
    pipeline.set_adapters("ours")
    guidance = 1.0 if kind == "FluxPipeline" else 3.0
    images = renderer.draw(PROMPTS, SEEDS, evaluation=False)
    expected = call(pipeline, PROMPTS, SEEDS, guidance_scale=guidance)
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)
    assert (images - load(kind).draw(PROMPTS, SEEDS, evaluation=False)).abs().max() > 1e-3
    assert f"and LoRA {lora}, 2 steps" in str(renderer)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("SanaPipeline", {"negative_prompt": "cats"}, "negative_prompt: expected empty, or guidance and eval_guidance"),
        ("StableDiffusionPipeline", {"max_sequence_length": 99}, "max_sequence_length: expected its default"),
        ("FluxPipeline", {"lora": "./nowhere"}, r"no such folder: \./nowhere"),
        ("FluxPipeline", {"path": "./nowhere"}, r"no such folder: \./nowhere"),
    ],
)
def test_what_a_pipeline_ignores_is_refused_before_anything_is_read(kind, fields, message, folders):
    with pytest.raises(UserError, match=message) as caught:
        judge_of(kind, folders[kind]).replace(**fields).check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("FluxPipeline", {"eval_guidance": 2.0}, "guidance, eval_guidance: expected 1, as .* draws without guidance"),
        ("StableDiffusionPipeline", {"size": 30}, "`height` and `width` have to be divisible by 8"),
        ("FluxPipeline", {"size": 30}, "size: the model draws 28 pixels where 30 were asked for"),
    ],
)
def test_what_does_not_fit_together_is_refused_when_it_is_loaded(kind, fields, message, folders):
    with pytest.raises(UserError, match=message) as caught:
        judge_of(kind, folders[kind], **fields).load("cpu")
    assert "\n" not in str(caught.value)


def test_lora_weights_that_do_not_fit_are_refused(folders, tmp_path):
    pytest.importorskip("peft")
    lora = lora_of("StableDiffusionXLPipeline", folders["StableDiffusionXLPipeline"], tmp_path / "lora")
    with pytest.raises(UserError, match="expected weights of a SanaPipeline"):
        judge_of("SanaPipeline", folders["SanaPipeline"], lora=str(lora)).load("cpu")
    with pytest.raises(UserError, match="lora: expected none, as a PixArtSigmaPipeline takes none"):
        judge_of("PixArtSigmaPipeline", folders["PixArtSigmaPipeline"], lora=str(lora)).load("cpu")
    (file,) = lora.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(UserError, match="cannot load LoRA weights from"):
        judge_of("FluxPipeline", folders["FluxPipeline"], lora=str(lora)).load("cpu")


def test_folders_of_other_kinds_and_with_code_are_refused(folders, tmp_path):
    copy = shutil.copytree(folders["FluxPipeline"], tmp_path / "copy")
    index = json.loads((copy / "model_index.json").read_text())
    trace = tmp_path / "trace"
    (copy / "transformer" / "mine.py").write_text(f"open({str(trace)!r}, 'w')\n")
    for change, message in (
        ({"transformer": ["mine", "Mine"]}, "expected no code that comes with the weights, got .transformer"),
        ({"_class_name": ["mine", "Mine"]}, "expected a text-to-image pipeline of diffusers, got"),
        ({"_class_name": "StableVideoDiffusionPipeline"}, "diffusers, got .a StableVideoDiffusionPipeline"),
    ):
        (copy / "model_index.json").write_text(json.dumps(index | change))
        for refused in (judge_of("FluxPipeline", copy).check, lambda: judge_of("FluxPipeline", copy).load("cpu")):
            with pytest.raises(UserError, match=message):
                refused()
    assert not trace.exists()


def test_only_safetensors_are_read(folders, tmp_path):
    from safetensors.torch import load_file

    copy = shutil.copytree(folders["PixArtSigmaPipeline"], tmp_path / "copy")
    (weights,) = (copy / "vae").glob("*.safetensors")
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises(UserError, match="cannot load the renderer"):
        judge_of("PixArtSigmaPipeline", copy).load("cpu")
