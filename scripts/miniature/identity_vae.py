"""An ``AutoencoderKL`` that is the identity, so that at 32×32 the diffusion happens in pixels.

Its weights are set, not trained. Zero convolutions switch off the residual branches, so two group normalisations
and two SiLUs remain on the way in and out. A colour x is the channel group (εx, −εx, 1, −1), whose mean is 0 and
whose deviation is constant up to ε²; and silu(y) − silu(−y) = y.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL

_EPSILON = 1 / 64


@torch.no_grad()
def identity_vae(size: int) -> AutoencoderKL:
    """An autoencoder with latents equal to the picture, to about 1e-4."""
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=3,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(12,),
        layers_per_block=1,
        norm_num_groups=3,
        sample_size=size,
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )
    for name, parameter in vae.named_parameters():
        if name.endswith("conv2.weight") or name.endswith("conv2.bias"):
            parameter.zero_()
    for half in (vae.encoder, vae.decoder):
        for conv in (half.conv_in, half.conv_out):
            conv.weight.zero_()
            conv.bias.zero_()
        half.conv_norm_out.bias.zero_()
        half.conv_norm_out.weight.zero_()
        for colour in range(3):
            plus, minus, one, minus_one = range(4 * colour, 4 * colour + 4)
            half.conv_in.weight[plus, colour, 1, 1] = _EPSILON
            half.conv_in.weight[minus, colour, 1, 1] = -_EPSILON
            half.conv_in.bias[one], half.conv_in.bias[minus_one] = 1.0, -1.0
            half.conv_norm_out.weight[plus] = half.conv_norm_out.weight[minus] = 0.5**0.5 / _EPSILON
            half.conv_out.weight[colour, plus, 1, 1] = 1.0
            half.conv_out.weight[colour, minus, 1, 1] = -1.0
    vae.encoder.conv_out.bias[3:] = -20.0  # log-variance: the posterior is its mean
    return vae.eval()
