"""Tiny random text-to-image pipelines of diffusers, saved as the folders of their real counterparts.

Every function takes the folder to write and returns it; pictures are 32 x 32. Weights are random but fixed.
"""

from pathlib import Path

import torch
from support.tiny_models import LETTERS, VAE, chat_tokenizer, clip_text_encoder, clip_tokenizer, tiny_t5
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPTextModel, CLIPTextModelWithProjection, PreTrainedTokenizerFast

UNET = dict(
    sample_size=16,
    in_channels=4,
    out_channels=4,
    layers_per_block=1,
    block_out_channels=(8, 16),
    norm_num_groups=4,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
)


def stable_diffusion(folder) -> Path:
    """A U-Net that listens to one CLIP encoder, with a safety checker that paints every picture black."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig, CLIPImageProcessor

    torch.manual_seed(0)
    tower = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    vision = tower | dict(image_size=32, patch_size=16)
    checker = StableDiffusionSafetyChecker(CLIPConfig(vision_config=vision, text_config=tower, projection_dim=8))
    tokenizer = clip_tokenizer()
    return _save(
        StableDiffusionPipeline(
            vae=AutoencoderKL(**VAE),
            text_encoder=clip_text_encoder(CLIPTextModel, tokenizer),
            tokenizer=tokenizer,
            unet=UNet2DConditionModel(**UNET, cross_attention_dim=16, attention_head_dim=4),
            scheduler=DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1),
            safety_checker=checker,
            feature_extractor=CLIPImageProcessor(size=32, crop_size=32),
        ),
        folder,
    )


def stable_diffusion_xl(folder) -> Path:
    """A U-Net that listens to two CLIP encoders and the pooled state of the second, with the turbo's scheduler."""
    from diffusers import (
        AutoencoderKL,
        EulerAncestralDiscreteScheduler,
        StableDiffusionXLPipeline,
        UNet2DConditionModel,
    )

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        **UNET,
        cross_attention_dim=32,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=16 + 6 * 8,
        transformer_layers_per_block=(1, 1),
    )
    tokenizers = clip_tokenizer(), clip_tokenizer()
    return _save(
        StableDiffusionXLPipeline(
            vae=AutoencoderKL(**VAE),
            text_encoder=clip_text_encoder(CLIPTextModel, tokenizers[0]),
            text_encoder_2=clip_text_encoder(CLIPTextModelWithProjection, tokenizers[1]),
            tokenizer=tokenizers[0],
            tokenizer_2=tokenizers[1],
            unet=unet,
            scheduler=EulerAncestralDiscreteScheduler(beta_schedule="scaled_linear", timestep_spacing="trailing"),
        ),
        folder,
    )


def flux(folder, *, guidance_embeds: bool = False) -> Path:
    """A transformer over packed latents with a T5 and a pooled CLIP; schnell's has no embedding of the guidance."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=guidance_embeds,
    )
    tokenizer = clip_tokenizer()
    t5_tokenizer, t5_encoder = tiny_t5(d_model=24)
    return _save(
        FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=AutoencoderKL(**VAE, shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False),
            text_encoder=clip_text_encoder(CLIPTextModel, tokenizer),
            tokenizer=tokenizer,
            text_encoder_2=t5_encoder,
            tokenizer_2=t5_tokenizer,
            transformer=transformer,
        ),
        folder,
    )


def sana(folder) -> Path:
    """Linear attention over a deeply compressed picture, with Gemma's decoder for an encoder."""
    from diffusers import AutoencoderDC, FlowMatchEulerDiscreteScheduler, SanaPipeline, SanaTransformer2DModel
    from transformers import Gemma2Config, Gemma2Model

    torch.manual_seed(0)
    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        mlp_ratio=2.0,
        patch_size=1,
        sample_size=16,
    )
    vae = AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.4,
    )
    tokenizer = _gemma_tokenizer()
    encoder = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return _save(
        SanaPipeline(
            tokenizer=tokenizer,
            text_encoder=Gemma2Model(encoder).eval(),
            vae=vae,
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        ),
        folder,
    )


def pixart_sigma(folder) -> Path:
    """A transformer with cross-attention to a T5, which also predicts a variance."""
    from diffusers import AutoencoderKL, DDIMScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel

    torch.manual_seed(0)
    transformer = PixArtTransformer2DModel(
        sample_size=16,
        num_layers=1,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        cross_attention_dim=16,
        caption_channels=24,
        in_channels=4,
        out_channels=8,
        norm_num_groups=1,
        use_additional_conditions=False,
    )
    tokenizer, encoder = tiny_t5(d_model=24)
    return _save(
        PixArtSigmaPipeline(
            tokenizer=tokenizer,
            text_encoder=encoder,
            vae=AutoencoderKL(**VAE),
            transformer=transformer,
            scheduler=DDIMScheduler(clip_sample=False),
        ),
        folder,
    )


def z_image(folder) -> Path:
    """A transformer that reads a Qwen3; neither names a size of pictures."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    tokenizer = chat_tokenizer()
    layers = dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8)
    encoder = Qwen3Config(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, pad_token_id=0, **layers)
    transformer = ZImageTransformer2DModel(
        in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
        axes_dims=[8, 4, 4], axes_lens=[256, 32, 32],
    )  # fmt: skip
    return _save(
        ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=AutoencoderKL(**VAE, shift_factor=0.1),
            text_encoder=Qwen3Model(encoder),
            tokenizer=tokenizer,
            transformer=transformer,
        ),
        folder,
    )


def _save(pipeline, folder) -> Path:
    pipeline.save_pretrained(folder, safe_serialization=True)
    return Path(folder)


def _gemma_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every word, and a start token as Gemma's tokenizer has; words are letters."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "red", "dog", "two", "cats", "of", *LETTERS]
    words = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    special = dict(pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)
