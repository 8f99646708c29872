"""Tiny random models, written as the folders of their real counterparts.

Every function takes the folder to write and returns it. Weights are random but fixed.
"""

import json
from pathlib import Path

import torch
from support import torch_reference
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import CLIPTokenizer, PreTrainedTokenizerFast, T5Tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
VOCAB_SIZE = 272  # larger than the tokenizers' 259 and 264, as in the real Qwen models
VAE = dict(
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    block_out_channels=(8, 8),
    norm_num_groups=4,
    latent_channels=4,
    sample_size=32,
)
TWO_LAYERS = dict(depth=2, hidden_size=16, out_hidden_size=32, intermediate_size=24)
TOWERS = {
    "qwen2_vl": dict(depth=1, embed_dim=16, hidden_size=32, mlp_ratio=2),
    # a layer with windows of 2 x 2 merged tokens and one without
    "qwen2_5_vl": TWO_LAYERS | dict(window_size=16, fullatt_block_indexes=[1]),
    # the first layer is deepstack's; 8 x 8 positions
    "qwen3_vl": TWO_LAYERS | dict(num_position_embeddings=64, deepstack_visual_indexes=[0]),
}
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789,.!-'"


def chat_tokenizer(extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Byte-level tokenizer (one token per byte) with ChatML's special tokens and chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CHAT_TOKENS + extra])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def causal_lm(folder, architecture: str = "qwen2", *, seed: int = 0, max_shard_size: str = "1GB", **overrides) -> Path:
    """A random folder of a model of text with a tokenizer and two end-of-sequence ids."""
    config_class, model_class = torch_reference.ARCHITECTURES[architecture]
    tokenizer = chat_tokenizer()
    fields = _text_fields(architecture, tokenizer) | {"tie_word_embeddings": False}
    if architecture == "gemma2":
        fields |= dict(query_pre_attn_scalar=16, sliding_window=8)
        del fields["attn_logit_softcapping"], fields["final_logit_softcapping"]
    torch.manual_seed(seed)
    model = model_class(config_class(**(fields | overrides)))
    return _save_language_model(model, tokenizer, folder, max_shard_size)


def qwen_vl(folder, architecture: str = "qwen2_vl") -> Path:
    """A random Qwen-VL folder with a tokenizer."""
    config_class, model_class, _, sections = torch_reference.VISION[architecture]
    tokenizer = chat_tokenizer(VISION_TOKENS)
    names = ("vision_start", "vision_end", "image", "video")
    tokens = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(t) for name, t in zip(names, tokens, strict=True)}
    config = config_class(
        text_config=_text_fields(architecture, tokenizer)
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}}
        | {"num_hidden_layers": 1},
        vision_config=dict(num_heads=2, patch_size=4) | TOWERS[architecture],
        tie_word_embeddings=False,
        **ids,
    )
    torch.manual_seed(0)
    return _save_language_model(model_class(config), tokenizer, folder, "1GB")


def _text_fields(architecture: str, tokenizer) -> dict:
    own = dict(vocab_size=VOCAB_SIZE, max_position_embeddings=512, **_ids(tokenizer))
    fields = torch_reference.SHAPE | torch_reference.OWN.get(architecture, {}) | own
    del fields["attn_implementation"]
    return fields


def _ids(tokenizer) -> dict:
    # transformers falls back to ids of the real vocabulary, far outside this one
    return dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


def _save_language_model(model, tokenizer, folder, max_shard_size: str) -> Path:
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.eval().save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def clip_tokenizer() -> CLIPTokenizer:
    """CLIP's tokenizer with letters for words; the end token has the highest id, as in the real one."""
    pieces = list(LETTERS) + [letter + "</w>" for letter in LETTERS] + ["<|startoftext|>", "<|endoftext|>"]
    merges = [("r", "e"), ("re", "d</w>"), ("o", "f</w>"), ("d", "o"), ("do", "g</w>")]
    pieces[-2:-2] = ["".join(pair) for pair in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77)


def stable_diffusion_3(folder, *, t5: bool = True, **overrides) -> Path:
    """A random `StableDiffusion3Pipeline` folder: 16×16 pictures, two CLIP encoders and perhaps a T5.

    `overrides` are fields of the transformer.
    """
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextModelWithProjection

    torch.manual_seed(0)
    tokenizers = clip_tokenizer(), clip_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=40,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=16,
        **overrides,
    )
    unquantised = dict(scaling_factor=1.5, shift_factor=0.06, use_quant_conv=False, use_post_quant_conv=False)
    vae = AutoencoderKL(**VAE | {"sample_size": 16}, **unquantised)
    t5_tokenizer, t5_encoder = tiny_t5(d_model=40) if t5 else (None, None)
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=clip_text_encoder(CLIPTextModelWithProjection, tokenizers[0]),
        tokenizer=tokenizers[0],
        text_encoder_2=clip_text_encoder(CLIPTextModelWithProjection, tokenizers[1], hidden_act="gelu"),
        tokenizer_2=tokenizers[1],
        text_encoder_3=t5_encoder,
        tokenizer_3=t5_tokenizer,
    )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return Path(folder)


def clip_text_encoder(kind, tokenizer: CLIPTokenizer, **overrides):
    """A CLIP text tower of two layers, of transformers' class `kind`."""
    from transformers import CLIPTextConfig

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        projection_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **overrides,
    )
    return kind(config).eval()


def tiny_t5(d_model: int):
    """A tokenizer of letters and a T5 encoder of one layer."""
    from transformers import T5Config, T5EncoderModel

    pieces = ["<pad>", "</s>", "<unk>", "▁"] + list(LETTERS) + ["▁" + letter for letter in LETTERS]
    vocab = [(piece, 0.0 if i < 3 else -2.0) for i, piece in enumerate(pieces)]
    tokenizer = T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)
    config = T5Config(
        vocab_size=len(pieces),
        d_model=d_model,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return tokenizer, T5EncoderModel(config).eval()


def clip(folder) -> Path:
    """A random open_clip folder (`local-dir:` form) with a ViT tower and its own tokenizer."""
    import open_clip
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = clip_tokenizer()
    tokenizer.save_pretrained(folder)
    model_cfg = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 24, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {
            "context_length": 77,
            "vocab_size": len(tokenizer),
            "width": 32,
            "heads": 2,
            "layers": 2,
            "hf_tokenizer_name": "tokenizer of this folder",
        },
    }
    preprocess_cfg = {
        "size": 24,
        "mean": [0.48145466, 0.4578275, 0.40821073],
        "std": [0.26862954, 0.26130258, 0.27577711],
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    }
    config = {"model_cfg": model_cfg, "preprocess_cfg": preprocess_cfg}
    (folder / "open_clip_config.json").write_text(json.dumps(config, indent=2))
    torch.manual_seed(0)
    model = open_clip.CLIP(**{k: v for k, v in model_cfg.items() if k != "embed_dim"}, embed_dim=16)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "open_clip_model.safetensors")
    return folder


def dinov2(folder) -> Path:
    """A random Dinov2 folder that takes pictures of 28 x 28 pixels."""
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    config = Dinov2Config(
        image_size=28, patch_size=14, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2
    )
    Dinov2Model(config).save_pretrained(folder)
    settings = {"crop_size": {"height": 28, "width": 28}, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.25, 0.3]}
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(settings))
    return Path(folder)


def clip_model(folder) -> Path:
    """A random `CLIPModel` folder of transformers, laid out like PickScore's, that takes pictures of 24 x 24 pixels."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    tokenizer, tower = clip_tokenizer(), dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    ends = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    config = CLIPConfig(
        text_config=dict(**tower, **ends, num_attention_heads=2, vocab_size=len(tokenizer), projection_dim=16),
        vision_config=dict(**tower, num_attention_heads=2, image_size=24, patch_size=8, projection_dim=16),
        projection_dim=16,
    )
    torch.manual_seed(0)
    CLIPModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 24}, crop_size=24).save_pretrained(folder)
    return Path(folder)


def detector(folder, names=("dog", "mouse", "red ball")) -> Path:
    """A random YOLOS folder that finds eight objects of some kinds in pictures of any size."""
    from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessor

    config = YolosConfig(
        **dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, patch_size=8),
        **dict(image_size=[24, 32], num_detection_tokens=8, initializer_range=0.5),
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
    )
    torch.manual_seed(0)
    YolosForObjectDetection(config).save_pretrained(folder)
    YolosImageProcessor(size={"shortest_edge": 24, "longest_edge": 48}).save_pretrained(folder)
    return Path(folder)


def reward_model(folder, **overrides) -> Path:
    """A random `Qwen2ForSequenceClassification` folder with a chat template and one output."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    tokenizer = chat_tokenizer()
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    fields = dict(vocab_size=VOCAB_SIZE, num_key_value_heads=2, num_labels=1, **sizes, **_ids(tokenizer)) | overrides
    torch.manual_seed(0)
    Qwen2ForSequenceClassification(Qwen2Config(**fields)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
