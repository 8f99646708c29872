"""Qwen3-MoE: Qwen3's attention, and a mixture of experts for an MLP (Qwen team 2025, arXiv:2505.09388).

The auxiliary loss that balances experts in pre-training (``router_aux_loss_coef``) is no part of what is learned here.
Adapters go on attention alone: an expert's would have to be one of X in a stack.
"""

from grpo_jax.models import hf_config
from grpo_jax.models.architectures import llama
from grpo_jax.models.architectures.architecture import COLUMNS, ROWS
from grpo_jax.models.architectures.llama import DecoderConfig, Mixture, read_shared, same_window
from grpo_jax.models.rope import read_rope

MODEL_TYPE = "qwen3_moe"
_DEFAULTS = {
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_EXPERTS = hf_config.whole(1, 2**14)
_EXTRA_KINDS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok", "decoder_sparse_step"), _EXPERTS),
    **dict.fromkeys(("norm_topk_prob", "output_router_logits"), hf_config.FLAG),
    "moe_intermediate_size": hf_config.WIDTH,
    "mlp_only_layers": hf_config.LAYER_NUMBERS,
}


def read_config(config: hf_config.Fields) -> DecoderConfig:
    """Read a Qwen3-MoE's ``config.json``; transformers 5 writes ``num_experts`` as ``num_local_experts``."""
    fields = {**_DEFAULTS, **hf_config.not_null(config)}
    fields["num_experts"] = fields.get("num_local_experts", fields["num_experts"])
    shared = read_shared(fields, MODEL_TYPE, extra_kinds=_EXTRA_KINDS, honoured=("num_experts", "num_local_experts"))
    dense = [layer for layer in fields.get("mlp_only_layers", ()) if layer < shared["num_layers"]]
    # The layers are one stack, so they are all of one kind, as in every published folder.
    hf_config.expect(not dense, "mlp_only_layers", "experts in every layer", dense)
    hf_config.refuse_changed(fields, {"decoder_sparse_step": (1,)}, MODEL_TYPE)
    experts, chosen = fields["num_experts"], fields["num_experts_per_tok"]
    hf_config.expect(chosen <= experts, "num_experts_per_tok", f"at most num_experts={experts}", chosen)
    bias = bool(fields.get("attention_bias", False))
    return DecoderConfig(
        **shared,
        rope=read_rope(fields),
        windows=same_window(fields, fields["sliding_window"] if fields.get("use_sliding_window") else None),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        mixture=Mixture(
            experts,
            chosen,
            fields["moe_intermediate_size"],
            bool(fields.get("norm_topk_prob", False)),
        ),
    )


_PARTS = ("gate", "up", "down")

ARCHITECTURE = llama.ARCHITECTURE._replace(
    model_types=(MODEL_TYPE,),
    read=read_config,
    projections={"q_proj": COLUMNS, "k_proj": COLUMNS, "v_proj": COLUMNS, "o_proj": ROWS},
    naming=llama.NAMING._replace(
        modules=llama.NAMING.modules
        | {"router": "mlp.gate"}
        | {f"{part}_experts": f"mlp.experts.{{}}.{part}_proj" for part in _PARTS},
        together={
            "mlp.experts.gate_up_proj": ("gate_experts", "up_experts"),
            "mlp.experts.down_proj": ("down_experts",),
        },
    ),
)
