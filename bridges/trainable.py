"""Training of a renderer: LoRA weights and the transformer in torch, the loss in JAX.

    torch: v = transformer(x_t, text, t)  ──dlpack──► JAX: value_and_grad(loss)(v, v_old, …)
           v.backward(dL/dv)              ◄──dlpack── dL/dv

torch keeps the graph of the transformer, JAX that of the loss (`grpo_jax.core.flow`); only velocities and their
gradients cross. The trained weights draw in evaluation. Their average, the old weights, draws the pictures of training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from peft import LoraConfig, get_peft_model_state_dict
from torch.nn.attention import SDPBackend, sdpa_kernel

from bridges.diffusion import Renderer
from bridges.dlpack import to_jax, to_torch
from bridges.judges import RendererTraining, RenderSettings
from grpo_jax.core.flow import FlowMetrics, add_noise, awm_loss, diffusion_nft_loss, unit_rewards

TRAINED, OLD = "trained", "old"
ADAPTER = "default"  # diffusers' own name: files of another name need `adapter_name` to load
SMALLEST_TIME = 0.02  # the losses weigh a time by its value: below this one a forward pass is wasted


class TrainableRenderer(Renderer):
    """A renderer with LoRA weights; `learn` trains them on the pictures that it drew.

    Attributes:
        train: The settings.
        updates: Number of optimizer steps.
    """

    def __init__(self, renderer: Renderer, train: RendererTraining, *, seed: int):
        """Add LoRA to a loaded renderer's pipeline; `seed` draws its start, which changes no picture."""
        vars(self).update(vars(renderer))
        self.train, self.updates = train, 0
        self.training = replace(renderer.training, weights=OLD)
        self.evaluation = replace(renderer.evaluation, weights=TRAINED)
        self._transformer = self.pipeline.transformer
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
        options = {"beta": train.beta, "scale": train.advantage_clip} if train.loss == "nft" else {}
        loss = diffusion_nft_loss if train.loss == "nft" else awm_loss
        loss = functools.partial(loss, reference_coef=train.reference_coef, **options)
        self._loss = jax.jit(jax.value_and_grad(loss, has_aux=True))

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

        def keep(_pipeline: object, _step: int, _time: object, tensors: dict[str, torch.Tensor]) -> dict:
            latents[:] = [tensors["latents"]]
            return {}

        def note(_module: torch.nn.Module, _arguments: tuple, options: dict) -> None:
            calls.append(options)

        with self._transformer.register_forward_pre_hook(note, with_kwargs=True):
            images = super()._draw(batch, settings, keep)
        given = {name: value for name, value in calls[-1].items() if name not in ("hidden_states", "timestep")}
        of_text = [name for name, value in given.items() if torch.is_tensor(value) and not name.endswith("_ids")]
        self._shared = {name: value for name, value in given.items() if name not in of_text}
        times = self.pipeline.scheduler.sigmas[: len(calls)].tolist()
        steps = [(time, call["timestep"][0]) for time, call in zip(times, calls, strict=True) if time >= SMALLEST_TIME]
        self._times, self._timesteps = np.float32([time for time, _ in steps]), torch.stack([step for _, step in steps])
        for row, (text, seed) in enumerate(batch):
            self._latents[text, seed] = latents[0][row]
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
        clip = self.train.advantage_clip
        weights = np.asarray(unit_rewards(np.float32(advantages), clip=clip))
        if self.train.loss == "awm":
            weights = np.clip(np.float32(advantages), -clip, clip) / clip
        metrics = {"signal": len(rows) / max(present, 1)}
        with self._lock:
            for update in range(self.train.updates if len(rows) else 0):
                metrics |= self._update(pictures, weights, rows, present, jax.random.fold_in(key, update))
            if len(rows):
                decay = min(self.train.old_decay.factor * self.updates, self.train.old_decay.maximum)
                old, trained = (list(self._values[name].values()) for name in (OLD, TRAINED))
                torch._foreach_lerp_(old, trained, 1.0 - decay)
                self._forget_pictures()
            self._latents.clear()
            self._texts.clear()
        return metrics

    def _update(
        self, pictures: list[tuple[str, int]], weights: np.ndarray, rows: np.ndarray, present: int, key: jax.Array
    ) -> dict[str, float]:
        """Take one optimizer step on the pictures of `rows`."""
        of_times, of_noise = jax.random.split(key)
        number = len(self._times)
        orders = jax.vmap(lambda key: jax.random.permutation(key, number))(jax.random.split(of_times, len(pictures)))
        chosen = np.asarray(orders)[:, : self.train.times]
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
            self.updates += 1
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
        with torch.set_grad_enabled(weights == TRAINED), _attention(self.device):
            return self._transformer(**inputs)[0]

    def _choose(self, weights: str) -> None:
        """Show the trained weights, the old ones or none to the pipeline."""
        if weights == self._chosen:
            return
        if weights:
            self._transformer.enable_adapters()
            for name, parameter in self._parameters.items():
                parameter.data = self._values[weights][name]
        else:
            self._transformer.disable_adapters()
        self._chosen = weights

    def _forget_pictures(self) -> None:
        """Drop the cached pictures of weights that changed."""
        kept = [(key, image) for key, image in self._cache.images.items() if not key[-1].weights]
        self._cache.images.clear()
        self._cache.bytes = 0
        for key, image in kept:
            self._cache.put(key, image)

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
        """Return what an exact resume needs: trained and old weights, AdamW's moments, the number of updates."""
        tensors = {f"{kind}/{name}": value for kind, values in self._values.items() for name, value in values.items()}
        for name, parameter in self._parameters.items():
            moments = self._optimizer.state.get(parameter, {})
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{moment}/{name}"] = moments.get(moment, torch.zeros_like(parameter))
        arrays = {name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors.items()}
        return arrays | {"updates": np.array(self.updates)}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a `state`."""
        with self._lock, torch.no_grad():
            self.updates = int(state["updates"])
            for name, parameter in self._parameters.items():
                for kind, values in self._values.items():
                    values[name].copy_(torch.from_numpy(np.array(state[f"{kind}/{name}"])))
                moments = {
                    moment: torch.from_numpy(np.array(state[f"{moment}/{name}"])).to(self.device)
                    for moment in ("exp_avg", "exp_avg_sq")
                }
                self._optimizer.state[parameter] = {"step": torch.tensor(float(self.updates)), **moments}
            self._forget_pictures()
            self._latents.clear()
            self._texts.clear()

    def save_lora(self, folder: Path) -> None:
        """Write `pytorch_lora_weights.safetensors`, which `pipeline.load_lora_weights(folder)` reads."""
        with self._lock:
            self._choose(TRAINED)
            self.pipeline.save_lora_weights(
                folder,
                transformer_lora_layers=get_peft_model_state_dict(self._transformer, adapter_name=ADAPTER),
                transformer_lora_adapter_metadata=self._transformer.peft_config[ADAPTER].to_dict(),
            )


@jax.jit
def _noised(key: jax.Array, x0: jax.Array, samples: jax.Array, times: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Add each sample's own noise; return x_t and its velocity."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, samples)
    noise = jax.vmap(lambda key: jax.random.normal(key, x0.shape[1:], jnp.float32))(keys)
    return add_noise(x0, noise, times)


def _lora_config(train: RendererTraining) -> LoraConfig:
    return LoraConfig(
        r=train.lora.rank,
        lora_alpha=train.lora.alpha,
        init_lora_weights="gaussian",
        target_modules=list(train.lora.targets),
    )


def _in_bfloat16(forward: Callable[..., tuple], device: torch.device) -> Callable[..., tuple]:
    """Return a transformer's forward pass that computes in bfloat16; its output is float32, as the latents are."""

    @functools.wraps(forward)
    def call(*arguments: object, **options: object) -> tuple:
        with torch.autocast(device.type, torch.bfloat16):
            return (forward(*arguments, **options)[0].float(),)

    return call


def _attention(device: torch.device) -> AbstractContextManager[object]:
    """On a CPU the fused attention's backward is several times slower at small sizes."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()
