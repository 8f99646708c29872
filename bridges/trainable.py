"""Training of a renderer: LoRA weights and the transformer in torch, the loss in JAX.

    torch: v = transformer(x_t, text, t)  ──dlpack──► JAX: value_and_grad(loss)(v, v_old, …)
           v.backward(dL/dv)              ◄──dlpack── dL/dv

torch keeps the graph of the transformer, JAX that of the loss (`grpo_jax.core.flow`); only velocities and their
gradients cross. The trained weights draw in evaluation. Their average, the old weights, draws the pictures of training.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from peft import LoraConfig, get_peft_model_state_dict
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bridges.diffusion import Renderer, denoiser, find_pipeline
from bridges.dlpack import to_jax, to_torch
from bridges.judges import PipelineJudge, RendererTraining, RenderSettings
from bridges.loading import DTYPES, quiet_loading, transformer_config
from grpo_jax.config.fields import require
from grpo_jax.config.files import load_json
from grpo_jax.core.flow import FlowMetrics, add_noise, diffusion_nft_loss, unit_rewards

TRAINED, OLD = "trained", "old"
ADAPTER = "default"  # diffusers' own name: files of another name need `adapter_name` to load
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's
SCHEDULER = "FlowMatchEulerDiscreteScheduler"
DISTILLED = re.compile(r"turbo|schnell|lightning|lcm|hyper-sd")
SMALLEST_TIME = 0.02  # the losses weigh a time by its value: below this one a forward pass is wasted


class TrainableRenderer(Renderer):
    """A renderer with LoRA weights; `learn` trains them on the pictures that it drew."""

    def __init__(self, renderer: Renderer, train: RendererTraining, *, seed: int):
        """Add LoRA to a loaded renderer's pipeline; `seed` draws its start, which changes no picture."""
        vars(self).update(vars(renderer))
        scheduler, network = self.pipeline.scheduler, denoiser(self.pipeline)
        _require_flow(
            self.name, type(self.pipeline).__name__, type(scheduler).__name__, network.config, self.training.guidance
        )
        self.train = train
        self.updates, self.skipped = 0, 0  # optimizer steps, and those in a row whose gradient was not finite
        self._workers = 1  # `_draw` keeps what the transformer was given
        self.training = replace(renderer.training, weights=OLD)
        self.evaluation = replace(renderer.evaluation, weights=TRAINED)
        self._transformer = self.pipeline.transformer
        loaded = list(getattr(self._transformer, "peft_config", {}))
        require(not loaded, "train", "null, or a pipeline without LoRA, or with it merged", loaded)
        layers = [name for name, one in self._transformer.named_modules() if isinstance(one, nn.Linear | nn.Conv2d)]
        unknown = [name for name in train.lora.targets if not any(f".{it}".endswith(f".{name}") for it in layers)]
        require(not unknown, "train.lora.targets", f"layers of a {type(network).__name__}", unknown)  # PEFT skips them
        self._transformer.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self._transformer.add_adapter(_lora_config(train), ADAPTER)
        self._parameters = {name: p for name, p in self._transformer.named_parameters() if p.requires_grad}
        values = {name: p.data.float() for name, p in self._parameters.items()}
        # `_choose` shows one of them to the pipeline; an optimizer step writes to the trained ones
        self._values = {TRAINED: values, OLD: {name: value.clone() for name, value in values.items()}}
        self._chosen = ""
        self._choose(TRAINED)
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=train.learning_rate, weight_decay=train.weight_decay
        )
        if train.autocast:
            self._transformer.forward = _in_bfloat16(self._transformer.forward, self.device)
        self._latents: dict[tuple[str, int], torch.Tensor] = {}
        self._texts: dict[str, dict[str, torch.Tensor]] = {}
        self._loss = _value_and_grad(train.beta, train.advantage_clip, train.reference_coef)

    def _draw(
        self,
        batch: list[tuple[str, int]],
        settings: RenderSettings,
        on_step_end: Callable[..., dict[str, torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """Render one batch; of the old weights' pictures keep the latents, and what the transformer was given."""
        self._choose(settings.weights)
        if settings.weights != OLD:
            return super()._draw(batch, settings)
        calls: list[dict] = []
        latents: list[torch.Tensor] = []
        with self._transformer.register_forward_pre_hook(lambda *call: calls.append(call[-1]), with_kwargs=True):
            images = super()._draw(batch, settings, lambda *step: latents.append(step[-1]["latents"]) or {})
        given = {name: value for name, value in calls[-1].items() if name not in ("hidden_states", "timestep")}
        of_text = [name for name, value in given.items() if torch.is_tensor(value) and not name.endswith("_ids")]
        self._shared = {name: value for name, value in given.items() if name not in of_text}
        times = self.pipeline.scheduler.sigmas[: len(calls)].tolist()
        steps = [(time, call["timestep"][0]) for time, call in zip(times, calls, strict=True) if time >= SMALLEST_TIME]
        self._times = np.array([time for time, _ in steps], np.float32)
        self._timesteps = torch.stack([step for _, step in steps])
        for row, (text, seed) in enumerate(batch):
            self._latents[text, seed] = latents[-1][row]
            self._texts.setdefault(text, {name: given[name][row] for name in of_text})
        return images

    def learn(
        self, texts: Sequence[str], seeds: Sequence[int], advantages: np.ndarray, key: jax.Array
    ) -> dict[str, float]:
        """Train on pictures drawn in training since the last call, which it forgets; return metrics.

        Pictures of advantage 0 are skipped, as they have no gradient at v = v_old, but count in the mean.

        Args:
            texts: B texts that were drawn.
            seeds: Their seeds.
            advantages: f32 [B]; 0 for no signal, NaN for a missing reward, which does not count.
            key: Draws noise and times; the update is a function of the state, the pictures and the key.

        Raises:
            KeyError: A picture was not drawn since the last call.
        """
        pictures = [(text, int(seed)) for text, seed in zip(texts, seeds, strict=True)]
        rows, present = np.flatnonzero(np.nan_to_num(advantages)), int(np.sum(~np.isnan(advantages)))
        if gone := [pictures[row] for row in rows if pictures[row] not in self._latents]:
            raise KeyError(gone[0])
        weights = np.asarray(unit_rewards(np.asarray(advantages, np.float32), clip=self.train.advantage_clip))
        metrics = {"signal": len(rows) / max(present, 1)}
        with self._lock:
            for update in range(self.train.updates if len(rows) else 0):
                metrics |= self._update(pictures, weights, rows, present, jax.random.fold_in(key, update))
            if len(rows):
                decay = min(self.train.old_decay.factor * self.updates, self.train.old_decay.maximum)
                for name, value in self._values[OLD].items():
                    value.lerp_(self._values[TRAINED][name], 1.0 - decay)
            self._forget_pictures()
        return metrics

    def _update(
        self, pictures: list[tuple[str, int]], weights: np.ndarray, rows: np.ndarray, present: int, key: jax.Array
    ) -> dict[str, float]:
        """Take one optimizer step on the pictures of `rows`."""
        of_times, of_noise = jax.random.split(key)
        chosen = np.asarray(_orders(of_times, len(pictures), len(self._times)))[:, : self.train.times]
        samples = np.array([(row, place) for row in rows for place in chosen[row]])
        parts = []
        for start in range(0, len(samples), self.train.micro_batch):
            part = samples[start : start + self.train.micro_batch]
            total = float(present * chosen.shape[1])
            parts.append(self._backward([pictures[row] for row in part[:, 0]], weights, part, total, of_noise))
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self.train.max_grad_norm)
        finite = bool(torch.isfinite(norm))
        if finite:
            self._optimizer.step()
        self.updates, self.skipped = self.updates + finite, 0 if finite else self.skipped + 1
        self._optimizer.zero_grad()
        sums = jax.tree.map(lambda *values: sum(map(float, values)), *parts)
        means = {name: float(mean.value()) for name, mean in sums._asdict().items()}
        return means | {"grad_norm": float(norm), "skipped": float(not finite)}

    def _backward(
        self, pictures: list[tuple[str, int]], weights: np.ndarray, samples: np.ndarray, total: float, key: jax.Array
    ) -> FlowMetrics:
        """Add the gradient of some samples (row, place of its time), padded to the micro-batch."""
        padding = self.train.micro_batch - len(samples)
        pictures = pictures + pictures[-1:] * padding
        rows, places = np.concatenate([samples, np.repeat(samples[-1:], padding, axis=0)]).T
        x0 = to_jax(torch.stack([self._latents[picture] for picture in pictures]).float())
        (device,) = x0.devices()
        times = self._times[places]
        noisy, target = _noised(jax.device_put(key, device), x0, rows * len(self._times) + places, times)
        conditions = [self._texts[text] for text, _ in pictures]
        inputs = {name: torch.stack([one[name] for one in conditions]) for name in conditions[0]} | self._shared
        inputs["hidden_states"] = to_torch(noisy, self.device).to(self._latents[pictures[0]].dtype)
        inputs["timestep"] = self._timesteps[torch.as_tensor(places, device=self._timesteps.device)]
        reference = self._velocity(inputs, "") if self.train.reference_coef else None
        old, v = self._velocity(inputs, OLD), self._velocity(inputs, TRAINED)
        (_, metrics), gradient = self._loss(
            to_jax(v.float(), device),
            to_jax(old.float(), device),
            target,
            weights[rows],
            times,
            reference=None if reference is None else to_jax(reference.float(), device),
            mask=np.arange(len(rows)) < len(samples),
            rows=total,
        )
        v.backward(to_torch(gradient, self.device).to(v.dtype))
        return metrics

    def _velocity(self, inputs: Mapping[str, torch.Tensor], weights: str) -> torch.Tensor:
        """Return the transformer's output; only that of the trained weights has a gradient."""
        self._choose(weights)
        # on a CPU the fused attention's backward is several times slower at small sizes
        attention = sdpa_kernel(SDPBackend.MATH) if self.device.type == "cpu" else nullcontext()
        with torch.set_grad_enabled(weights == TRAINED), attention:
            return self._transformer(**inputs)[0]

    def _choose(self, weights: str) -> None:
        """Show the trained weights, the old ones or none to the pipeline."""
        if weights == self._chosen:
            return
        if weights:
            if not self._chosen:  # PEFT walks over all modules, longer than a small forward takes
                self._transformer.enable_adapters()
            for name, parameter in self._parameters.items():
                parameter.data = self._values[weights][name]
        else:
            self._transformer.disable_adapters()
        self._chosen = weights

    def _forget_pictures(self) -> None:
        """Drop the pictures of LoRA weights, and what their training needs."""
        pictures = self._cache.images
        self._cache = type(self._cache)(self._cache.max_bytes)
        for key, picture in pictures.items():
            if not key[-1].weights:
                self._cache.put(key, picture)
        self._latents.clear()
        self._texts.clear()

    @contextmanager
    def untrained(self) -> Iterator[None]:
        """Draw without LoRA within the context."""
        settings = self.training, self.evaluation
        self.training, self.evaluation = (replace(one, weights="") for one in settings)
        try:
            yield
        finally:
            self.training, self.evaluation = settings

    def state(self) -> dict[str, np.ndarray]:
        """Return what an exact resume needs: trained and old weights, AdamW's moments, the numbers of updates."""
        tensors = {f"{kind}/{name}": value for kind, values in self._values.items() for name, value in values.items()}
        for name, parameter in self._parameters.items():
            moments = self._optimizer.state.get(parameter, {})
            for moment in MOMENTS:
                tensors[f"{moment}/{name}"] = moments.get(moment, torch.zeros_like(parameter))
        arrays = {name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors.items()}
        return arrays | {"updates": np.array(self.updates), "skipped": np.array(self.skipped)}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a `state`."""
        with self._lock, torch.no_grad():
            self.updates, self.skipped = int(state["updates"]), int(state["skipped"])
            for name, parameter in self._parameters.items():
                for kind, values in self._values.items():
                    values[name].copy_(torch.from_numpy(np.array(state[f"{kind}/{name}"])))
                moments = {m: torch.from_numpy(np.array(state[f"{m}/{name}"])).to(self.device) for m in MOMENTS}
                self._optimizer.state[parameter] = {"step": torch.tensor(float(self.updates)), **moments}
            self._forget_pictures()

    def save_lora(self, folder: Path) -> None:
        """Write `pytorch_lora_weights.safetensors`, which `pipeline.load_lora_weights(folder)` reads."""
        with self._lock:
            self._choose(TRAINED)
            self.pipeline.save_lora_weights(
                folder,
                transformer_lora_layers=get_peft_model_state_dict(self._transformer, adapter_name=ADAPTER),
                transformer_lora_adapter_metadata=self._transformer.peft_config[ADAPTER].to_dict(),
            )


@functools.cache
def _value_and_grad(beta: float, clip: float, reference_coef: float) -> Callable:
    """Return the loss with its gradient, compiled once for all renderers of equal settings.

    With the published factor a picture's weight is its clipped advantage.
    """
    loss = functools.partial(diffusion_nft_loss, beta=beta, scale=clip, reference_coef=reference_coef)
    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _orders(key: jax.Array, rows: int, number: int) -> jax.Array:
    """Return for each row a random order of the times, `[rows, number]`."""
    return jax.vmap(lambda key: jax.random.permutation(key, number))(jax.random.split(key, rows))


@jax.jit
def _noised(key: jax.Array, x0: jax.Array, samples: jax.Array, times: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Add each sample's own noise; return x_t and its velocity."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, samples)
    noise = jax.vmap(lambda key: jax.random.normal(key, x0.shape[1:], jnp.float32))(keys)
    return add_noise(x0, noise, times)


def check_training(judge: PipelineJudge) -> None:
    """Refuse a renderer that cannot be trained, before weights are read; of a hub id `load` checks the rest."""
    source, index = find_pipeline(judge.path)
    config = {}
    if isinstance(source, Path) and "transformer" in index:
        config = load_json(source / "transformer" / "config.json")
    _require_flow(str(source), index["_class_name"], index["scheduler"][1], config, judge.guidance)


def _require_flow(path: str, kind: str, scheduler: str, transformer: Mapping[str, object], guidance: float) -> None:
    """Raise UserError unless a pipeline predicts a flow's velocity, from unquantised and undistilled weights."""
    embedded, flow = transformer.get("guidance_embeds"), ("StableDiffusion3Pipeline", "FluxPipeline")
    velocities = f"null, or a pipeline that predicts a flow's velocity ({', '.join(flow)}, with {SCHEDULER})"
    require(kind in flow and scheduler == SCHEDULER, "train", velocities, f"{kind} with {scheduler}")
    name = Path(path).name
    # FLUX.1-schnell embeds no guidance; other distilled pipelines differ from their base only by name
    distilled = (kind == "FluxPipeline" and embedded is False) or DISTILLED.search(name.lower())
    require(not distilled, "train", "null, or a pipeline not distilled to few steps: training blurs its pictures", name)
    require("quantization_config" not in transformer, "train", "null, or weights that are not quantised", name)
    require(
        guidance <= 1 or embedded, "guidance", "1 with train: the picture must be the trained model's own", guidance
    )


def training_memory(judge: PipelineJudge, train: RendererTraining, *, fused: bool = True) -> list[tuple[str, int, str]]:
    """Return the bytes of a renderer's training by part: LoRA with its optimizer, and activations.

    The transformer runs on torch's meta device, and torch counts the tensors that its backward pass would keep; `fused`
    attention, as on a GPU, keeps no matrix of scores.
    """
    import diffusers

    config, pixels = transformer_config(judge.path)
    dtype = torch.bfloat16 if train.autocast else DTYPES[judge.dtype]
    saved: dict[int, torch.Tensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        scores = tensor.ndim > 2 and tensor.shape[-1] == tensor.shape[-2]
        return tensor if fused and scores else saved.setdefault(tensor.untyped_storage()._cdata, tensor)

    with quiet_loading(), torch.device("meta"):
        model = getattr(diffusers, config["_class_name"]).from_config(config).to(dtype).requires_grad_(False)
        model.add_adapter(_lora_config(train), ADAPTER)
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in weights:
            parameter.data = parameter.data.float()
        edge = judge.size // pixels or config.get("sample_size", 128)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            model(**{name: value.to(dtype) for name, value in _example(judge, model.config, edge).items()})
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage()._cdata, None)
    activations = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    lora = 5 * 4 * sum(parameter.numel() for parameter in weights)
    return [
        ("LoRA", lora, "trained and old weights, gradients, AdamW's moments"),
        ("activations", train.micro_batch * activations, f"of {train.micro_batch} pictures"),
    ]


def _example(judge: PipelineJudge, config: Mapping[str, int], edge: int) -> dict[str, torch.Tensor]:
    """Return the transformer's arguments for a picture whose latent is `edge` wide."""
    words, channels = 77 + 256, config["in_channels"]
    shapes: dict[str, tuple[int, ...]] = {"hidden_states": (1, channels, edge, edge)}
    if "guidance_embeds" in config:  # FLUX
        words, places = getattr(judge, "max_sequence_length", 0) or 512, (edge // 2) ** 2
        shapes = {"hidden_states": (1, places, channels), "img_ids": (places, 3), "txt_ids": (words, 3)}
        shapes["guidance"] = (1,)
    shapes |= {"encoder_hidden_states": (1, words, config["joint_attention_dim"]), "timestep": (1,)}
    shapes["pooled_projections"] = (1, config["pooled_projection_dim"])
    return {name: torch.empty(shape) for name, shape in shapes.items()}


def _lora_config(train: RendererTraining) -> LoraConfig:
    rank, alpha, targets = train.lora.rank, train.lora.alpha, list(train.lora.targets)
    return LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=targets)


def _in_bfloat16(forward: Callable[..., tuple], device: torch.device) -> Callable[..., tuple]:
    """Return a transformer's forward pass that computes in bfloat16; its output is float32, as the latents are."""

    @functools.wraps(forward)
    def call(*arguments: object, **options: object) -> tuple:
        with torch.autocast(device.type, torch.bfloat16):
            return (forward(*arguments, **options)[0].float(),)

    return call
