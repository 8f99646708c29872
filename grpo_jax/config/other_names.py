"""Names that are no fields here: TRL's, for hints and docs/coming_from_trl.md, and those that left.

An entry is "names there": "fields here, then what differs". A field may have the value that is meant ("field:
value"). An entry that begins with NOT_HERE has no place, and says why.
"""

from collections.abc import Sequence

NOT_HERE = "not here: "
_COMPILED = f"{NOT_HERE}the sampler is compiled with the policy and uses its weights where they lie"
_TORCH = f"{NOT_HERE}JAX spreads weights, batch and sampler over policy.mesh (docs/scaling.md)"
_ALWAYS = f"{NOT_HERE}it is always so"
_NEVER = f"{NOT_HERE}nothing of that kind is needed or done"

TRAINER = {
    "model": "policy.path; a folder or a name on the hub, not a model object",
    "reward_funcs": "rewards; or functions, run(config, rewards=[…])",
    "args": f"{NOT_HERE}the config is what `make_config` returns, and run(config) takes it",
    "train_dataset": "data.prompts; or rows, a DataFrame or a Dataset, run(config, prompts=…)",
    "eval_dataset": "data.test, data.validation; else data.held_out of the data is kept apart",
    "processing_class": f"{NOT_HERE}the policy's folder has its tokenizer or processor",
    "reward_processing_classes": f"{NOT_HERE}a judge's folder has its tokenizer (docs/judges.md)",
    "callbacks": f"{NOT_HERE}run(config, on_iteration=…, on_validation=…) takes functions (docs/runs.md)",
    "optimizers": f"{NOT_HERE}AdamW, set by the section optimizer",
    "quantization_config": "policy.quantised; int8 or int4, with LoRA",
    "peft_config": "policy.lora",
    "tools": "data.tools; functions by import path, with sampling.turns (docs/turns.md)",
    "rollout_func": f"{NOT_HERE}the sampler is the policy's own; what answers it is task.environment (docs/turns.md)",
    "environment_factory": "data.tools; the class as it is, by import path, with sampling.turns (docs/turns.md)",
    "log_extra": f"{NOT_HERE}a reward adds numbers by log_metric (docs/rewards.md), and no columns to completions/",
}
"""Arguments of `GRPOTrainer`, and what it gives to rewards that has no counterpart."""

GRPO_CONFIG = {
    "learning_rate": "optimizer.learning_rate; 1e-6 too, or 1e-4 with LoRA, unless said otherwise",
    "model_init_kwargs": "policy.compute_dtype, policy.frozen_dtype, policy.quantised; the rest has no place",
    "trust_remote_code": f"{NOT_HERE}no code of a folder is run",
    "cast_lm_head_to_fp32, shuffle_dataset, pad_to_multiple_of, log_completions, num_completions_to_print, "
    "log_unique_prompts, log_multimodal": _ALWAYS,
    "disable_dropout, router_aux_loss_coef, remove_unused_columns, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, "
    "vespo_lambda_neg, log_completions_hub_repo, ref_model_mixup_alpha, off_policy_mask_threshold, "
    "vllm_structured_outputs_regex": _NEVER,
    "num_generations": "sampling.group_size",
    "num_generations_eval": "evaluation.samples",
    "max_completion_length": "sampling.max_new_tokens; 128 unless said otherwise",
    "ds3_gather_for_generation": f"{NOT_HERE}no DeepSpeed; policy.mesh spreads weights and sampler alike",
    "generation_batch_size": "training.prompts_per_batch; in prompts, which are sampled together",
    "steps_per_generation": "training.minibatches; updates made of one sampled batch",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p; the cuts act on drawing alone, the whole distribution is trained (docs/sampling.md)",
    "top_k": "sampling.top_k; as top_p",
    "min_p": "sampling.min_p; as top_p",
    "generation_kwargs": "sampling.stop, data.forbidden_tokens; the rest has no place",
    "chat_template_kwargs": "data.chat_template_options, data.tools",
    "repetition_penalty": f"{NOT_HERE}data.forbidden_tokens forbids tokens altogether",
    "cache_implementation": f"{NOT_HERE}there is one cache, whose prompt a group shares",
    "use_vllm, vllm_mode, vllm_model_impl, vllm_enable_sleep_mode, vllm_server_base_url, vllm_server_host, "
    "vllm_server_port, vllm_server_timeout, vllm_group_port, vllm_gpu_memory_utilization, vllm_max_model_length, "
    "vllm_tensor_parallel_size": _COMPILED,
    "use_transformers_continuous_batching, transformers_continuous_batching_config, use_transformers_paged": _COMPILED,
    "beta": "algorithm.kl_coef; 0 too unless said otherwise",
    "use_bias_correction_kl": "algorithm.kl_corrected",
    "num_iterations": "training.inner_epochs",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "delta": f"{NOT_HERE}the core's grpo_loss takes it, as Clip(dual=…)",
    "sapo_temperature_neg, sapo_temperature_pos": "algorithm.preset: sapo; with the paper's (the core: SoftGate)",
    "importance_sampling_level": "algorithm.preset; gspo for sequences, the others for tokens",
    "reward_weights": "rewards; each has a weight",
    "multi_objective_aggregation": "algorithm.advantage; grpo sums first, gdpo normalises first",
    "scale_rewards": "algorithm.scale; group, batch or none",
    "loss_type": "algorithm.preset; all of them but luspo and vespo, and gspo besides",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "sync_ref_model, ref_model_sync_steps": "algorithm.update_ref_every; 0 for never",
    "top_entropy_quantile": "algorithm.entropy_share",
    "entropy_coef": "algorithm.entropy_coef",
    "use_adaptive_entropy, entropy_target": "algorithm.entropy_target; a number adapts algorithm.entropy_coef to it",
    "entropy_coef_delta": "algorithm.entropy_coef_delta",
    "entropy_coef_min, entropy_coef_max": f"{NOT_HERE}an adapting algorithm.entropy_coef stays within 0 and 1",
    "max_tool_calling_iterations": "sampling.turns; how often the policy writes (docs/turns.md)",
    "vllm_importance_sampling_correction, vllm_importance_sampling_mode, vllm_importance_sampling_clip_max, "
    "vllm_importance_sampling_cap": "algorithm.importance_cap; of a token's weight between sampler and update",
    "vllm_importance_sampling_clip_min": f"{NOT_HERE}weights have an upper bound alone, algorithm.importance_cap",
}
"""Fields that TRL 1.16 declares in `GRPOConfig` itself."""

TRAINING_ARGUMENTS = {
    "output_dir, run_name, logging_dir": "run_dir; the folder's name is the run's",
    "per_device_train_batch_size": "training.prompts_per_batch; in prompts, over all devices",
    "gradient_accumulation_steps": "training.grad_accumulation_steps; the gradient is the whole batch's",
    "auto_find_batch_size": "training.grad_accumulation_steps; --plan says what fits",
    "logging_steps, logging_strategy, logging_first_step, eval_on_start, dataloader_drop_last, torch_compile, "
    "torch_compile_backend, torch_compile_mode, use_liger_kernel, liger_kernel_config": _ALWAYS,
    "torch_empty_cache_steps, neftune_noise_alpha, label_smoothing_factor, ignore_data_skip, train_sampling_strategy, "
    "length_column_name, dataloader_num_workers, dataloader_pin_memory, dataloader_persistent_workers, "
    "dataloader_prefetch_factor, disable_tqdm, per_device_eval_batch_size, greater_is_better": _NEVER,
    "optim, optim_args, optim_target_modules, adam_epsilon, lr_scheduler_kwargs": f"{NOT_HERE}AdamW, set by optimizer",
    "num_train_epochs": "training.num_epochs",
    "max_steps": "training.max_steps; in batches sampled, 100 unless said otherwise, 0 for num_epochs",
    "lr_scheduler_type": "optimizer.schedule; constant unless said otherwise",
    "warmup_steps": "optimizer.warmup_steps",
    "warmup_ratio": "optimizer.warmup_steps; in updates",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.max_grad_norm",
    "adam_beta1": f"{NOT_HERE}it is 0.9",
    "adam_beta2": "optimizer.beta2; .99 unless said otherwise",
    "bf16": "policy.compute_dtype: bfloat16",
    "fp16": "policy.compute_dtype: bfloat16; it needs no scale of the loss",
    "tf32": "policy.matmul_precision: high",
    "bf16_full_eval, fp16_full_eval": f"{NOT_HERE}policy.compute_dtype is that of evaluation too",
    "gradient_checkpointing, gradient_checkpointing_kwargs, activation_checkpointing, "
    "activation_checkpointing_kwargs": "policy.remat: layer",
    "report_to": "report_to; tensorboard, wandb; others by a callback (docs/runs.md)",
    "project": f"{NOT_HERE}Weights & Biases reads WANDB_PROJECT (grpo_jax without it)",
    "eval_strategy, eval_steps": "evaluation.every; 0 for never",
    "save_strategy, save_steps": "training.save_every; 0 for the end only",
    "save_total_limit": "training.keep_checkpoints; 2 beside best and final unless said otherwise",
    "save_only_model": f"{NOT_HERE}a checkpoint holds all that resuming needs; policy/ is the model alone",
    "load_best_model_at_end": f"{NOT_HERE}--checkpoint best of evaluate and export takes checkpoints/best",
    "metric_for_best_model": "evaluation.best_by; for early stopping too",
    "early_stopping_patience": "training.early_stopping_patience; in validations",
    "resume_from_checkpoint": "resume",
    "seed, data_seed": "seed; one for everything random",
    "full_determinism": "deterministic",
    "use_cpu": "devices; such as devices.policy: cpu",
    "fsdp, fsdp_config": "policy.mesh.fsdp; the number of parts (docs/scaling.md)",
    "deepspeed, accelerator_config, parallelism_config, ddp_find_unused_parameters, ddp_bucket_cap_mb, ddp_backend, "
    "ddp_timeout, local_rank": _TORCH,
    "push_to_hub, hub_model_id": "push_to_hub; OWNER/NAME in place of true (docs/publishing.md)",
    "hub_private_repo": f"{NOT_HERE}make a private repository on the hub first (docs/publishing.md)",
    "hub_strategy, hub_always_push, hub_revision": f"{NOT_HERE}there is one push, at the end (docs/publishing.md)",
    "hub_token": f"{NOT_HERE}the hub library's own login is used",
    "do_train, do_eval, do_predict": f"{NOT_HERE}train, evaluate and predict are commands",
}
"""Common fields of transformers' `TrainingArguments`, which `GRPOConfig` extends."""

COMMAND = {
    "model_name_or_path": "policy.path",
    "dtype, torch_dtype": "policy.compute_dtype",
    "attn_implementation": "policy.attn_implementation; auto or eager",
    "dataset_name": "data.prompts; of the hub hub:OWNER/NAME, perhaps with :CONFIG:SPLIT behind it",
    "dataset_config, dataset_train_split": "data.prompts; hub:OWNER/NAME:CONFIG:SPLIT",
    "dataset_test_split": "data.test; hub:OWNER/NAME:CONFIG:SPLIT",
    "dataset_streaming": f"{NOT_HERE}rows stay on disk and are mapped into memory (docs/data.md)",
    "reward_model_name_or_path": "judges; a reward model is one, and its name a reward (docs/judges.md)",
    "use_peft, lora_r": "policy.lora.rank; above 0",
    "lora_alpha": "policy.lora.alpha",
    "lora_target_modules": "policy.lora.targets",
    "lora_dropout, lora_modules_to_save, use_rslora, use_dora": f"{NOT_HERE}adapters are plain LoRA (docs/lora.md)",
    "load_in_8bit": "policy.quantised: int8",
    "load_in_4bit": "policy.quantised: int4",
    "max_prompt_length": "data.max_prompt_tokens; a longer prompt is an error",
    "batch_size": "training.prompts_per_batch",
    "system_prompt": "data.system_prompt",
}
"""Names of TRL's command line, and of earlier versions."""


OLDER_SCRIPTS = {
    "num_sample_generations, num_rollouts": "sampling.group_size; completions of each prompt",
    "k": "eval_rewards, sampling.group_size; a measure has its cut in its name, such as NAME@10",
    "reward_type": "rewards; each function is one, with its weight: several are mixed by the advantages",
    "use_dummy": "task.source: dummy",
    "dummy_size": "task.dummy_users",
    "sequential_file": "task.source",
    "prompt_file": "data.prompts",
    "policy_model": "policy.path",
    "normalize_rewards": "algorithm.advantage, algorithm.scale; gdpo normalises each reward by itself",
    "use_ref_model": "algorithm.kl_coef; above 0 there is a reference",
    "clip_ratio": "algorithm.clip_low, algorithm.clip_high",
    "kl_coef": "algorithm.kl_coef",
    "gamma": "ppo.gamma; groups compare whole completions, without a discount",
    "grpo_epochs": "training.inner_epochs; passes over one sampled batch",
    "update_ref_model_freq": "algorithm.update_ref_every; in iterations",
    "checkpoint_dir": "run_dir; checkpoints are in its folder checkpoints/",
    "max_length": "sampling.max_new_tokens, data.max_prompt_tokens; answer and prompt are bounded apart",
}
"""Options of older GRPO scripts."""

METRICS = {
    "avg_advantage": "mean_advantage",
    "avg_reward, mean_reward": "reward/total/mean; and reward/NAME/mean of each",
    "kl_penalty": "kl; its weight is algorithm.kl_coef",
    "total_loss": "loss",
}
"""What older scripts log, and the name in metrics.jsonl here."""


TRL = {
    name: entry
    for table in (TRAINER, GRPO_CONFIG, TRAINING_ARGUMENTS, COMMAND)
    for names, entry in table.items()
    for name in names.split(", ")
}
"""The entry of every name of TRL's tables."""
ALL_NAMES = TRL | {name: entry for names, entry in OLDER_SCRIPTS.items() for name in names.split(", ")}


def fields_of(entry: str) -> list[str]:
    """Return the dotted names of an entry's fields; none if it has no place here."""
    settings = [] if entry.startswith(NOT_HERE) else entry.partition("; ")[0].split(", ")
    return [setting.partition(": ")[0] for setting in settings if setting]


def metric_hint(name: str) -> str:
    """Return where an older script's metric is here, in brackets; "" for any other name."""
    entries = [entry for names, entry in METRICS.items() if name in names.split(", ")]
    return f" ({name} is {entries[0]} of metrics.jsonl)" if entries else ""


def hint_for(name: str, names: Sequence[str] | None = None, same: Sequence[str] = ()) -> str:
    """Return the text after "no such field; " for another program's name; "" if it is none, or has no place in `names`.

    `same` are fields of that name, which are meant rather than a name without a place.
    """
    entry = ALL_NAMES.get(name)
    fields = fields_of(entry or "")
    if entry is None or name in fields:
        return ""
    if names is not None and not (all(field in names for field in fields) if fields else not same):
        return ""
    return f"TRL's is {entry}" if entry.startswith(NOT_HERE) else f"here it is {entry}"


def _each(names: str, successor: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), successor)


REMOVED: dict[str, str] = {
    **_each(
        "algorithm.kl_estimator algorithm.resample_rounds algorithm.whiten optimizer.beta1 ppo.kl_estimator "
        "ppo.value_clip ppo.value_rate ppo.whiten evaluation.gallery evaluation.episodes evaluation.solved "
        "task.held_out task.retrieval.timeout task.retrieval.temperature task.retrieval.attempts "
        "task.dummy_length task.dummy_fickle task.dummy_noise task.dummy_seed judges.NAME.counting_threshold "
        "judges.NAME.position_threshold judges.NAME.most_objects judges.NAME.batch_attempts "
        "judges.NAME.pool.batch_attempts judges.NAME.max_restarts judges.NAME.pool.max_restarts",
        "is a constant now: leave it out",
    ),
    "watch": "is eval_rewards",
    "warm_start": "is sft",
    "training.lag": "is training.async_level",
    "training.accumulation": "is training.grad_accumulation_steps",
    "training.early_stopping_metric": "is evaluation.best_by, for the best checkpoint too",
    "training.keep_gib": "left: give training.keep_checkpoints; best and final take no room of their own",
    "training.memory_budget_gib": "left: --plan says what an update takes; set training.grad_accumulation_steps",
    "algorithm.dead_groups": "is algorithm.zero_variance_groups",
    "algorithm.turn_discount": "is algorithm.turn_gamma",
    "algorithm.discount": "is algorithm.gamma",
    "algorithm.trace": "is algorithm.gae_lambda",
    "algorithm.kl_straight_through": "left: use algorithm.kl_corrected",
    "ppo.discount": "is ppo.gamma",
    "ppo.trace": "is ppo.gae_lambda",
    **_each("ppo.kl_target ppo.kl_horizon", "left: ppo.kl_coef stays as it is given"),
    "project": "left: Weights & Biases reads WANDB_PROJECT",
    "debug": "is an option of the command alone: --debug",
    "hub_private": "left: make a private repository on the hub first",
    "process_timeout": "left: JAX's heartbeat ends the others within 20 s of a process that is gone",
    "policy.new.architecture": "left: a new policy is a Llama",
    "policy.new.vocabulary": "left: all words of the task become tokens",
    "evaluation.sampled": "is evaluation.samples: 0 for no sampled completions",
    **_each("evaluation.top_k evaluation.top_p", "is that of training"),
    "rewards.isolated": "left: use a judge of kind function in a pool of one actor (judges.NAME.pool)",
    "rewards.group": "left: place_in_group tells a reward where each group begins",
    "sampling.max_answer_tokens": "is sampling.max_observation_tokens",
    "sampling.group": "left: a group is always made of independent samples",
    "sampling.keep_prompt": "left: watch the gain over the unchanged prompt instead (eval_rewards: [alignment_gain])",
    "sampling.min_new_tokens": "left: a reward on length asks for longer completions",
    "sampling.repetition_penalty": "left: it set the sampler apart from the policy; data.forbidden_tokens acts on both",
    # data
    "data.template_date": 'is data.chat_template_options: {today: "YYYY-MM-DD"}',
    "data.enable_thinking": "is data.chat_template_options: {enable_thinking: true}",
    "data.allowed_tokens": "left: data.forbidden_tokens names tokens, each by its id or as a text",
    "data.streaming": "left: data files of any size are mapped into memory; give data.prompts alone",
    "data.shuffle_buffer": "left with data.streaming: the order is shuffled over the whole data set",
    "data.curriculum": "left: sort the prompts into several files and train on one after another",
    "data.informative_half_life": "left: use algorithm.zero_variance_groups resample or drop",
    # tasks
    "task.unusable": "is task.invalid",
    "task.isolated": "left: environments run in threads of the run, with judge_timeout as their limit",
    "task.pictures_per_text": "left: a group's texts are drawn from one noise",
    "task.answer": "is task.observation",
    **_each("task.negative_prompt task.guidance task.steps", "left: judges.renderer has this field, for all pictures"),
    "task.see_source": "left with pictures drawn from pictures",
    "task.listed": "left: rankings score every item of the catalogue; beside a prior 100 places count",
    "task.semantic_ids": "left: task.writes title or item",
    "task.item_start": "left: items' own words begin as the vectors of their titles",
    "task.training_targets": "left: every position of a history is trained",
    **_each("task.pairs task.pair_characters", "left: what SFT teaches follows from task.writes"),
    "task.exclude_history": "left: rankings leave the history out",
    "task.decay": "left: the decayed baselines take 0.7",
    **_each(
        "task.split task.held_out_items task.time_share",
        "left: each user's last item is held out, and the one before it for validation",
    ),
    "task.blank_titles": "left: an item without a title is kept",
    "task.order_column": "left: the report groups users by how often their target was taken",
    "task.minimum_rating": "left: drop low ratings from the file",
    "task.minimum_items": "left: users with fewer than 2 items are left out; drop others from the file",
    "task.prompts": "left: task.template makes the prompts",
    **_each("task.retrieval.dense task.retrieval.dense_weight", "left: one encoder ranks the catalogue"),
    "task.retrieval.ties": "left: ties count against the target",
    "task.retrieval.service": "left: runs find a service by task.retrieval.address alone",
    **_each("task.retrieval.budget task.retrieval.window", "left: a call that fails three times ends the run"),
    # kinds and configs
    "task.kind.prompt_recreation": "left: use prompt_refinement",
    "config.prompt_recreation_miniature": "left: use prompt_refinement_miniature",
    "config.prompt_recreation_sd3": "left: use prompt_refinement_sd3",
    "config.prompt_refinement_scenes": "left: use prompt_refinement_miniature or prompt_enhancement_scenes",
    "config.recommendation_slates": "left: take recommendation_quick, whose policy ranks the catalogue",
    "judges.kind.dino": "left: use examples/judges/dino.py:Dino",
    "judges.kind.ocr": "left: use examples/judges/ocr.py:Ocr",
    "judges.kind.open_nsfw": "left: use examples/judges/open_nsfw.py:OpenNsfw",
    "judges.kind.image_to_image": "left: use text_to_image",
    # judges
    **_each(
        "judges.NAME.scheduler judges.NAME.scheduler_options",
        "left: the pipeline's own, set in its folder's scheduler_config.json",
    ),
    "judges.NAME.preprocessing": "left: pictures are resized by the model's own library",
    "judges.NAME.lora_scale": "left: LoRA weights are added as they are",
    **{
        f"judges.NAME.{name}": f"left: use judges.NAME.pool.{name}"
        for name in ("replicas", "resources", "runtime_env", "address", "batch_timeout")
    },
    **_each("judges.NAME.batch judges.NAME.pool.batch", "left: an actor is given the judge's batch_size rows, or 32"),
    **_each("judges.NAME.in_flight judges.NAME.pool.in_flight", "left: an actor has one batch at a time"),
    # CartPole
    "rollout": "left: CartPole has algorithm.group_size; ppo plays 128 steps on each of 32 carts",
    "training.max_hours": "is no setting of CartPole, which takes a minute",
    "network": "left: CartPole's networks have a tanh layer of 64",
    **_each(
        "algorithm.width algorithm.value_coef algorithm.minibatches algorithm.gae_lambda algorithm.clip_low "
        "algorithm.clip_high algorithm.kl_coef algorithm.value_clip algorithm.entropy_coef optimizer.schedule "
        "optimizer.beta2 optimizer.max_grad_norm training.keep_checkpoints",
        "is no setting of CartPole: a constant of its training.py",
    ),
}
"""Names that left, by their dotted path, each with its successor; also kinds and configs."""
