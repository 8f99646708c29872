"""A trained policy as folders that other libraries load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_jax.errors import UserError
from grpo_jax.models.hf.folder import save_folder
from grpo_jax.models.hf.peft import save_adapters
from grpo_jax.models.lora import merging


def export_policy(
    folder: str | Path, loaded: Any, variables: dict[str, Any], lora: Any, *, dtype: str = "float32"
) -> None:
    """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads (Qwen2-VL: `AutoModelForImageTextToText`).

    Args:
        folder: Where to; it appears at once, when complete.
        loaded: The folder the policy came from, as read.
        variables: Its variables; adapters are merged into the weights, in float32 and a layer at a time.
        lora: The adapters' config, or None.
        dtype: Type of the language model's weights. In float32 nothing that was trained is rounded away; bfloat16
            keeps little of what small adapters changed. Tensors that are not the policy's (a vision tower) are copied
            as they are.

    Raises:
        UserError: The folder cannot be written.
    """
    save_folder(folder, loaded.folder, loaded.config, merging(variables, lora), dtype=dtype)


def export_adapters(folder: str | Path, loaded: Any, variables: dict[str, Any], lora: Any) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained` loads onto the base model.

    Args:
        folder: Where to; it appears at once, when complete.
        loaded: The folder the policy came from, as read.
        variables: Its variables.
        lora: The adapters' config.

    Raises:
        UserError: There are no adapters, or the folder cannot be written.
    """
    if lora is None:
        raise UserError("--adapters: this run trained all weights and has none (policy.lora.rank 0)")
    save_adapters(folder, variables["lora"], lora, loaded.config, base=loaded.name)
