"""Exchange arrays between JAX and torch through dlpack: shared memory on one device, one copy across devices.

A shared array is read-only by contract: neither side may write to it while the other may still read. It must not be
donated to a jitted function: with a living torch view, XLA copies on a CPU, and refuses on a GPU. Otherwise use
`copy=True`.
"""

from contextlib import nullcontext

import jax
import torch

from bridges.loading import torch_device

WIDE = (torch.int64, torch.float64)  # JAX holds these only with jax_enable_x64


def to_torch(array: jax.Array, device: str | torch.device | None = None, *, copy: bool = False) -> torch.Tensor:
    """Return the torch tensor of a JAX array, of the same dtype and shape.

    Without `copy`, on the same device, it shares the array's memory and keeps it alive: do not write to it.

    Args:
        array: Any shape and a dtype that torch supports; on one device, or replicated.
        device: "cpu", "gpu:N" or a torch device; None keeps the array's device. Copies between GPUs are direct, not
            through the host.
        copy: Return separate, writable memory, even on the same device.
    """
    if len(array.sharding.device_set) > 1:
        if not array.is_fully_replicated:
            raise ValueError(f"array: it is spread over {len(array.sharding.device_set)} devices; gather it first")
        array = array.addressable_data(0)
    (source,) = array.devices()
    if source.platform != "cpu" and not torch.cuda.is_available():
        # torch without GPU support cannot address GPU memory: this copy to the host is the only way
        array = jax.device_put(array, jax.local_devices(backend="cpu")[0])
    if next(iter(array.devices())).platform == "cpu":
        array.block_until_ready()  # on a GPU dlpack orders the streams, on the CPU nothing waits
    lent = torch.from_dlpack(array)
    tensor = lent if device is None else lent.to(torch_device(device))
    return tensor.clone() if copy and tensor is lent else tensor


def to_jax(tensor: torch.Tensor, device: jax.Device | None = None, *, copy: bool = False) -> jax.Array:
    """Return the JAX array of a torch tensor, of the same shape.

    Without `copy`, on the same device, it shares the tensor's memory (on the CPU if aligned to 64 bytes) and keeps it
    alive: do not write to the tensor, do not donate the array. torch first moves a tensor from a GPU that JAX does not
    see, directly between GPUs.

    Args:
        tensor: Any shape and strides; gradients are dropped. int64 and float64 are a TypeError unless JAX runs with
            x64, since JAX would truncate silently.
        device: None keeps the tensor's device if JAX sees it, else takes JAX's first device.
        copy: Copy the values now, for a tensor that is written to afterwards.
    """
    if tensor.dtype in WIDE and not jax.config.jax_enable_x64:
        raise TypeError(f"tensor: {tensor.dtype} needs jax_enable_x64; or convert it before")
    lent = tensor.detach().contiguous()
    if copy and lent.data_ptr() == tensor.data_ptr():
        lent = lent.clone()  # from_dlpack(copy=True) does not copy aligned memory
    target = _target(lent.device, device)
    if target.platform == "cpu" or lent.device.type == "cpu":
        if lent.device.type != "cpu":
            lent = lent.cpu()
        elif lent.is_pinned():
            lent = lent.clone()  # dlpack presents pinned memory as GPU memory
        array = _lend(lent)
        return array if target in array.devices() else jax.device_put(array, target)
    return _lend(_aligned(lent.to(torch.device("cuda", target.local_hardware_id))))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor that is not aligned to 16 bytes: a GPU program refuses such a parameter."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _lend(tensor: torch.Tensor) -> jax.Array:
    """Export a tensor while its GPU is torch's current device; torch refuses it otherwise."""
    with torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext():
        return jax.dlpack.from_dlpack(tensor)


def _target(source: torch.device, device: jax.Device | None) -> jax.Device:
    """Return the JAX device for a tensor on `source`. JAX's local hardware id is torch's number of a GPU."""
    if device is not None:
        return device
    if source.type == "cpu":
        return jax.local_devices(backend="cpu")[0]
    cards = {d.local_hardware_id: d for d in jax.local_devices() if d.platform == "gpu"}
    return cards.get(source.index, jax.local_devices()[0])
