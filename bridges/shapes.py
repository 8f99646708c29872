"""Sizes of the judges from their config files: the models are built without memory (torch's meta device).

No weight is read, so a folder that holds the config files alone will do.
"""

from pathlib import Path

import torch

from bridges import bundled
from bridges.loading import first_line, local_folder, quiet_loading
from grpo_jax.config.files import load_json
from grpo_jax.errors import UserError

MODELS = ("transformer", "unet", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

PUBLISHED_PIPELINES: dict[str, tuple[dict[str, int], tuple[int, ...], int]] = {
    "stabilityai/stable-diffusion-3-medium-diffusers": (
        {
            "transformer": 2_084_951_104,
            "vae": 83_819_683,
            "text_encoder": 123_650_304,
            "text_encoder_2": 694_659_840,
            "text_encoder_3": 4_762_310_656,
        },
        (128, 256, 512, 512),
        1024,
    ),
    "stabilityai/sdxl-turbo": (
        {
            "unet": 2_567_463_684,
            "vae": 83_653_863,
            "text_encoder": 123_060_480,
            "text_encoder_2": 694_659_840,
        },
        (128, 256, 512, 512),
        512,
    ),
    "black-forest-labs/FLUX.1-schnell": (
        {
            "transformer": 11_891_178_560,
            "vae": 83_819_683,
            "text_encoder": 123_060_480,
            "text_encoder_2": 4_762_310_656,
        },
        (128, 256, 512, 512),
        1024,
    ),
}
"""Numbers in each model, widths of the VAE's blocks and edge of a picture, of pipelines on the hub."""


def pipeline_sizes(path: str) -> tuple[dict[str, int], tuple[int, ...], int]:
    """Numbers in each model of a pipeline, widths of its VAE's blocks, edge of its pictures.

    Args:
        path: A folder, a hub id of `PUBLISHED_PIPELINES`, or "miniature".

    Raises:
        UserError: There is no such folder, or a config in it is missing or of another kind.
    """
    if path in PUBLISHED_PIPELINES:
        return PUBLISHED_PIPELINES[path]
    folder = bundled(path, "renderer") or local_folder(path)
    if folder is None or not (folder / "model_index.json").is_file():
        raise UserError(f"renderer {path}: expected a folder with model_index.json and the components' config.json")
    index = load_json(folder / "model_index.json")
    named = {name: index[name] for name in MODELS if index.get(name, [None])[0]}
    sizes = {name: _size(library, kind, folder / name / "config.json") for name, (library, kind) in named.items()}
    vae = load_json(folder / "vae" / "config.json")
    widths = tuple(vae.get("block_out_channels") or vae["encoder_block_out_channels"])
    drawing = load_json(folder / ("transformer" if "transformer" in named else "unet") / "config.json")
    latents = drawing.get("sample_size", 128)  # FLUX's transformer has none: its pipeline says 128
    return sizes, widths, latents * 2 ** (len(widths) - 1)


def renderer_memory(
    sizes: dict[str, int],
    widths: tuple[int, ...],
    edge: int,
    *,
    dtype: str,
    batch_size: int,
    cache_megabytes: int,
    texts: str = "",
) -> list[tuple[str, int, str]]:
    """What a renderer takes: weights, and the working memory of its VAE, which is the most.

    The VAE holds three pictures of the second widest features at full size: those before, within and after its last
    block.

    Args:
        sizes: Numbers in each model.
        widths: Of the VAE's blocks.
        edge: Height and width of a picture.
        dtype: Of weights and computation.
        batch_size: Pictures drawn at once.
        cache_megabytes: For pictures that are kept.
        texts: More to say of the text encoders.
    """
    item = ITEM_BYTES[dtype]
    network, called = ("transformer", "transformer") if "transformer" in sizes else ("unet", "U-Net")
    encoders = sum(size for name, size in sizes.items() if name.startswith("text_encoder"))
    features = 3 * batch_size * widths[:2][-1] * edge * edge * item
    return [
        (f"{called} and VAE", item * (sizes[network] + sizes["vae"]), dtype),
        ("text encoders", item * encoders, f"{dtype}{texts}"),
        ("drawing", features, f"estimate: {batch_size} pictures of {edge} x {edge} in the VAE"),
        ("picture cache", cache_megabytes * 2**20, "cache_megabytes, once full"),
    ]


def clip_size(model: str) -> int:
    """Numbers in an open_clip model: a name that open_clip knows, or a folder in its layout.

    Raises:
        UserError: It is neither.
    """
    import open_clip

    name, folder = model.replace("/", "-"), local_folder(model.removeprefix("local-dir:"))
    if folder is not None:
        config = load_json(folder / "open_clip_config.json")["model_cfg"]
    elif name in open_clip.list_models():
        config = open_clip.get_model_config(name)
    else:
        raise UserError(f"scorer {model}: neither a folder nor a model that open_clip knows")
    config = {name: value for name, value in config.items() if name != "custom_text"}
    try:
        with torch.device("meta"):
            return _count(open_clip.CLIP(**config))
    except Exception as error:
        raise UserError(f"scorer {model}: {first_line(error)}") from error


def model_size(path: str, auto: str = "AutoModel") -> int:
    """Numbers in the model of a folder of transformers.

    Args:
        path: The folder.
        auto: The Auto class of transformers that builds it.

    Raises:
        UserError: There is no such folder, or its config is missing or of another kind.
    """
    import transformers

    folder = local_folder(path)
    if folder is None:
        raise UserError(f"{path}: its size is not known; give a folder with its config.json")
    config = load_json(folder / "config.json")
    try:
        with quiet_loading(), torch.device("meta"):
            known = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
            return _count(getattr(transformers, auto).from_config(known))
    except Exception as error:
        raise UserError(f"{folder / 'config.json'}: {first_line(error)}") from error


def _size(library: str, kind: str, path: Path) -> int:
    import diffusers
    import transformers

    config = load_json(path)
    try:
        with quiet_loading(), torch.device("meta"):
            if library == "diffusers":
                return _count(getattr(diffusers, kind).from_config(config))
            cls = getattr(transformers, kind)
            return _count(cls(cls.config_class.from_dict(config)))
    except Exception as error:  # a config of another version raises what it likes
        raise UserError(f"{path}: {kind} of {library}: {first_line(error)}") from error


def _count(model: torch.nn.Module) -> int:
    """Parameters, and the buffers that are saved with them (SD3's positions)."""
    saved = model.state_dict()
    buffers = (tensor for name, tensor in model.named_buffers() if name in saved)
    return sum(tensor.numel() for tensor in (*model.parameters(), *buffers))
