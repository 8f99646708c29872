"""TRL's own code, called on random tensors: only the model's forward and the generation are replaced.

Nothing of TRL is copied. Its trainer is made without `__init__`, given the attributes that its methods read,
and then `_compute_loss` gives the loss and torch the gradients, `_generate_and_score_completions` the
advantages and importance weights.
"""

from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch
from trl.trainer.grpo_trainer import GRPOTrainer


class OneProcess:
    """Accelerate's accelerator, of a single process: what is gathered is what was given."""

    device, num_processes, process_index, sync_gradients = torch.device("cpu"), 1, 0, True

    def gather(self, tensor):
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor, reduction):
        return tensor

    def pad_across_processes(self, tensor, dim, pad_index):
        return tensor


def trainer(kind=GRPOTrainer, args=(), **attributes):
    """A trainer of TRL's without a model: the attributes its loss reads, at TRL's defaults."""
    self = object.__new__(kind)
    self.__dict__.update(
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        _metrics={"train": defaultdict(list)},
        args=SimpleNamespace(
            use_bias_correction_kl=False,
            delta=None,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
            per_device_train_batch_size=1,
        ),
        loss_type="grpo",
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        entropy_coef=0.0,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        current_gradient_accumulation_steps=1,
    )
    self.__dict__.update(attributes)
    self.args.__dict__.update(args)
    return self


@contextmanager
def double():
    """What TRL makes of Python numbers (SAPO's temperatures) is float64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def tensor(array, **options):
    array = np.asarray(array)
    return torch.tensor(array.astype(np.float64) if array.dtype.kind == "f" else array, **options)


def trl_loss(parts, *, weights=None, args=(), **attributes):
    """GRPOTrainer's loss: (value, gradients of log-probabilities and entropies, what it logs)."""
    with double():
        logprobs, entropy = (tensor(parts[name], requires_grad=True) for name in ("logprobs", "entropy"))
        mask = tensor(parts["mask"]).long()
        self = trainer(args=args, **{"max_completion_length": mask.shape[1]} | attributes)
        self._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, entropy, None)
        inputs = {
            "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
            "completion_ids": torch.zeros_like(mask),
            "completion_mask": mask,
            "advantages": tensor(parts["advantages"]),
            "old_per_token_logps": tensor(parts["old"]),
            "ref_per_token_logps": tensor(parts["ref"]),
            "num_items_in_batch": tensor(parts.get("tokens", parts["mask"].sum())),
            "importance_sampling_ratio": None if weights is None else tensor(weights),
        }
        loss = self._compute_loss(None, inputs)
        loss.backward()
    entropy_gradient = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
    metrics = {name: values[-1] for name, values in self._metrics["train"].items()}
    return loss.item(), np.stack([logprobs.grad.numpy(), entropy_gradient.numpy()]), metrics


def trl_scored(rewards, *, kind=GRPOTrainer, weights=None, parts=None, finished=None, **attributes):
    """What the trainer makes of rewards `[P, G, N]`: advantages `[P, G]`, masks, importance weights."""
    prompts, group, objectives = rewards.shape
    rows = prompts * group
    if parts is None:
        zero = np.zeros((rows, 1))
        parts = {"mask": np.ones((rows, 1), bool), "old": zero, "ref": zero, "sampler": zero}
    lengths = parts["mask"].sum(1)
    finished = np.ones(rows, bool) if finished is None else finished
    names = [f"reward {n}" for n in range(objectives)]
    padding, end, word = 0, 1, 2
    ids = [[word] * (n - 1) + [end if done else word] for n, done in zip(lengths, finished, strict=True)]
    sampler = [row[:n].tolist() for row, n in zip(parts["sampler"], lengths, strict=True)]
    with double():
        defaults = {
            "environment_factories": None, "environments": None, "tools": None, "_is_vlm": False,
            "pad_to_multiple_of": None, "mask_truncated_completions": False, "eos_token_ids": [end],
            "_tokenizer": SimpleNamespace(pad_token_id=padding), "log_multimodal": False,
            "num_iterations": 1, "num_generations": group, "reward_clip_range": None,
            "reward_weights": torch.ones(objectives) if weights is None else tensor(weights),
            "reward_funcs": names, "reward_func_names": names, "normalize_advantages": False,
            "multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group",
            "_logs": defaultdict(list) | {"rewards": defaultdict(list)},
            "_pending_extra_logs": {}, "_pending_metrics": {}, "ref_model": "reference",
        }  # fmt: skip
        self = trainer(kind, **defaults | attributes)
        words = [""] * rows
        full = (ids, ids, None, words, sampler, {}, None, [])
        self._generate = lambda _: full if kind is GRPOTrainer else (ids, ids, words)
        self._calculate_rewards = lambda *_: tensor(rewards).reshape(rows, objectives)
        widest = int(lengths.max())
        self._get_per_token_logps_and_entropies = lambda model, *_, **__: (
            tensor(parts["ref" if model == "reference" else "old"])[:, :widest], None, None,
        )  # fmt: skip
        output = self._generate_and_score_completions([{"prompt": ""}] * rows)
    arrays = {name: value.numpy() for name, value in output.items()}
    return arrays | {"advantages": arrays["advantages"].reshape(prompts, group)}
