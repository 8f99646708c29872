"""Arrays handed from JAX to torch and back: values, memory, lifetime, refusals."""

import gc
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.xla import devices

torch = pytest.importorskip("torch")

from bridges.dlpack import _aligned, _lend, to_jax, to_torch  # noqa: E402 (only where torch is installed)

DTYPES = ["float32", "bfloat16", "int32", "uint8", "bool"]


def pointer(array):
    return array.unsafe_buffer_pointer()


def aligned(values):
    """A copy at an address that JAX takes on without copying."""
    tensor = torch.empty(values.numel() + 64, dtype=values.dtype)
    offset = -tensor.data_ptr() % 64 // tensor.element_size()
    tensor = tensor[offset : offset + values.numel()].view(values.shape)
    return tensor.copy_(values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ways_share_memory_and_keep_values(dtype):
    tensor = aligned((torch.arange(24).reshape(4, 6) % 5).to(getattr(torch, dtype)))
    array = to_jax(tensor)
    assert str(array.dtype) == dtype
    assert pointer(array) == tensor.data_ptr()
    np.testing.assert_array_equal(np.asarray(array, np.float32), tensor.float().numpy())
    back, values = to_torch(array), tensor.clone()
    assert back.dtype == tensor.dtype and back.data_ptr() == tensor.data_ptr()
    del tensor, array
    gc.collect(0)  # of what is new: all that a worker holds takes a second
    assert [torch.zeros(24) for _ in range(50)] and torch.equal(back, values)  # memory outlives its sources


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.rand(shape) for shape in ((), (0,), (3, 0, 2), (1,), (2, 3, 4))),
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(4.0).expand(5, 4),
        torch.arange(12.0).reshape(3, 4).flip(0),
        torch.ones(3, requires_grad=True) * 2,
    ],
    ids=lambda tensor: f"{list(tensor.shape)}{tensor.stride()}",
)
def test_any_shape_and_strides_arrive_without_gradients(tensor):
    array = to_jax(tensor)
    np.testing.assert_array_equal(np.asarray(array), tensor.detach().numpy())
    assert to_torch(array).shape == tensor.shape and not to_torch(array).requires_grad


def test_misaligned_memory_is_copied_on_the_cpu_and_for_a_card():
    tensor = aligned(torch.arange(32.0))
    array = to_jax(tensor[1:])
    assert pointer(array) != tensor[1:].data_ptr()
    np.testing.assert_array_equal(np.asarray(array), tensor[1:].numpy())
    assert _aligned(tensor[4:]).data_ptr() == tensor[4:].data_ptr()
    moved = _aligned(tensor[1:])
    assert moved.data_ptr() % 16 == 0 and torch.equal(moved, tensor[1:])


class OnCard(torch.Tensor):
    """A tensor that says it lies on the second card, for torch's own export."""

    device = torch.device("cuda", 1)


def test_a_tensor_is_exported_where_its_card_is_torchs_current_one(monkeypatch):
    current = [0]

    def exchange(card):
        before, current[0] = current[0], card
        return before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    for name in ("_exchange_device", "_maybe_exchange_device"):
        monkeypatch.setattr(torch.cuda, name, exchange)
    monkeypatch.setattr(jax.dlpack, "from_dlpack", lambda tensor: torch.Tensor.__dlpack__(tensor) and "exported")
    tensor = torch.arange(4.0).as_subclass(OnCard)
    with pytest.raises(BufferError, match="different CUDA device"):
        torch.Tensor.__dlpack__(tensor)
    assert _lend(tensor) == "exported" and current == [0]


def test_copies_are_independent():
    straight, strided, source = aligned(torch.zeros(64)), torch.zeros(8, 8), jnp.zeros(64)
    arrays = [to_jax(straight, copy=True), to_jax(strided.T, copy=True), source]
    for tensor in (straight, strided, to_torch(source, copy=True)):
        tensor.fill_(1)
    assert not any(np.any(np.asarray(array)) for array in arrays)


def test_a_living_view_is_not_overwritten_by_donation():
    source = jnp.arange(256.0)
    view = to_torch(source)
    jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(source).block_until_ready()
    assert torch.equal(view, torch.arange(256.0))


@pytest.mark.parametrize("tensor", [torch.tensor([2**40]), torch.zeros(2, dtype=torch.float64)])
def test_what_jax_would_truncate_is_refused(tensor):
    """jax.dlpack.from_dlpack turns 2^40 into 0 without a word."""
    with pytest.raises(TypeError, match="64 needs jax_enable_x64"):
        to_jax(tensor)


def test_wide_dtypes_with_x64(x64):
    array = to_jax(torch.tensor([2**40]))
    assert array.dtype == jnp.int64 and array.tolist() == [2**40]
    assert to_torch(jnp.zeros(2, jnp.float64)).dtype == torch.float64


def test_an_array_computed_by_jax_arrives_complete():
    """Dispatch is asynchronous: the view must not be read before the computation has ended."""
    square = jax.jit(lambda x: x @ x)
    for seed in range(10):
        x = jax.random.normal(jax.random.key(seed), (200, 200))
        np.testing.assert_allclose(to_torch(square(x)).numpy(), np.asarray(x) @ np.asarray(x), atol=1e-3)


DEVICES = """
import jax, jax.numpy as jnp, numpy as np, torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec as Spec
from bridges.dlpack import to_jax, to_torch
devices = jax.devices()
tensor = torch.arange(8.0)
for device in devices:
    array = to_jax(tensor, device)
    assert array.devices() == {device}
    assert torch.equal(to_torch(array, "cpu"), tensor)
mesh = Mesh(np.array(devices), ("x",))
same = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, Spec()))
assert torch.equal(to_torch(same), tensor)
spread = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, Spec("x")))
try:
    to_torch(spread)
except ValueError as error:
    assert "spread over 4 devices" in str(error)
else:
    raise SystemExit("a sharded array was taken")
print("done")
"""


def test_several_devices():
    env = os.environ | {"XLA_FLAGS": devices(4), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", DEVICES], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "done", done.stderr
