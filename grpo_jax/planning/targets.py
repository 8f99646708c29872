"""Target devices: XLA can compile for a GPU or a TPU on a machine without one.

The GPUs' figures come from OpenXLA's specifications. Peaks and bandwidths come from the vendors' data sheets, for dense
bfloat16 products with float32 accumulation.
"""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from grpo_jax.config.fields import require
from grpo_jax.errors import UserError, short_repr
from grpo_jax.planning import GIB, MEMORY, TARGET

_UNTIMED: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}
_WITHOUT_TRITON = _UNTIMED | {"xla_gpu_enable_triton_gemm": False}
"""Without timing, Triton finds no tiles for some products."""


class Gpu(NamedTuple):
    """Figures of a CUDA GPU: bytes, FLOP/s of bfloat16 products, bytes/s, capability, and XLA's parameters."""

    title: str
    memory: int
    flops: float
    bandwidth: float
    capability: tuple[int, int]
    core_count: int
    fpus_per_core: int
    threads_per_core_limit: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    clock_rate_ghz: float
    l2_cache_size: int


class Tpu(NamedTuple):
    """Figures of a TPU chip, like `Gpu`, and libtpu's topology for each number of chips."""

    title: str
    memory: int
    flops: float
    bandwidth: float
    shapes: dict[int, str]


_FLAT = {1: "2x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBE = {1: "2x2x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}
_HOPPER = ((9, 0), 132, 128, 2048, 233472, 232448, 1.98, 52428800)
_TURING = ((7, 5), 40, 64, 1024, 65536, 65536, 1.59, 4194304)
TARGETS: dict[str, Gpu | Tpu] = {
    "h100": Gpu("H100 SXM", 84942979072, 989.4e12, 3352.32e9, *_HOPPER),
    "h200": Gpu("H200 SXM", 151397597184, 989.4e12, 4800e9, *_HOPPER),
    "b200": Gpu("B200", 191514411008, 2250e12, 7672.32e9, (10, 0), 148, 128, 2048, 233472, 232448, 1.965, 132644864),
    "a100": Gpu("A100 SXM 80", 85100068864, 312e12, 2039.04e9, (8, 0), 108, 64, 2048, 167936, 166912, 1.41, 41943040),
    "a6000": Gpu("RTX A6000", 51041271808, 154.8e12, 768.096e9, (8, 6), 84, 128, 1536, 102400, 101376, 1.8, 6291456),
    "rtx6000pro": Gpu(
        "RTX PRO 6000", 103079215104, 503.8e12, 1792e9, (12, 0), 188, 128, 1536, 131072, 101376, 2.6, 134217728
    ),
    "rtx4090": Gpu("RTX 4090", 25386352640, 165.2e12, 1008e9, (8, 9), 128, 128, 1536, 102400, 101376, 2.52, 75497472),
    "l4": Gpu("L4", 23659151360, 121e12, 300e9, (8, 9), 58, 128, 1536, 102400, 101376, 2.04, 50331648),
    "t4": Gpu("T4 (slow: its bfloat16 products are float32)", 15828320256, 8.1e12, 320e9, *_TURING),
    "v5e": Tpu("TPU v5e", 16 * GIB, 197e12, 819e9, _FLAT),
    "v6e": Tpu("TPU v6e", 32 * GIB, 918e12, 1640e9, _FLAT),
    "v5p": Tpu("TPU v5p", 95 * GIB, 459e12, 2765e9, _CUBE),
}
_KNOWN = {(8, 0): "A100", (8, 6): "A10", (8, 9): "L4", (9, 0): "H100", (10, 0): "B200", (12, 0): "RTX PRO 6000"}
"""A card that Pallas knows, by capability; Pallas uses nothing else of it."""


class Target(NamedTuple):
    """A number of devices of one kind to compile for."""

    name: str
    devices: int = 1

    @property
    def kind(self) -> Gpu | Tpu:
        """Return the device's figures."""
        return TARGETS[self.name]

    @property
    def platform(self) -> str:
        """Return the platform, as `platform_of` names that of a device; Triton does not compile below sm_80."""
        if not isinstance(self.kind, Gpu):
            return "tpu"
        return "cuda" if self.kind.capability >= (8, 0) else "gpu"

    def __str__(self) -> str:
        return self.name if self.devices == 1 else f"{self.name}:{self.devices}"


def parse_target(text: str) -> Target:
    """Parse ``h100``, or ``h100:8`` for eight devices; UserError for other forms."""
    match = re.fullmatch(rf"({'|'.join(TARGETS)})(?::([1-9]\d{{0,3}}))?", text)
    if match is None:
        forms = f"one of {', '.join(TARGETS)}, with :DEVICES behind it, or {MEMORY} for another card"
        raise UserError(f"{TARGET}: expected {forms}, got {short_repr(text)}")
    return Target(match[1], int(match[2] or 1))


def nearest_gpu(gib: float, devices: int) -> Target:
    """Return the GPU with Triton whose memory is nearest, to compile for cards of which only that is known."""
    kinds = {name: kind for name, kind in TARGETS.items() if Target(name).platform == "cuda"}
    return Target(min(kinds, key=lambda name: abs(kinds[name].memory / GIB - gib)), devices)


def has_compiler(platform: str) -> bool:
    """Return whether XLA's compiler for a platform is installed."""
    return any(map(find_spec, ("libtpu",) if platform == "tpu" else ("jax_cuda12_plugin", "jax_cuda13_plugin")))


def prepare() -> None:
    """Keep JAX on the CPU, and stop its plugins from searching devices; call it before any other use of JAX."""
    for name, value in {"SKIP_MDS_QUERY": "1", "WORKER_HOSTNAMES": "localhost", "STDERR_LOG_LEVEL": "3"}.items():
        os.environ.setdefault(f"TPU_{name}", value)  # else libtpu queries Google's metadata server, and logs that
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # the lock protects chips; plans may run concurrently
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # checks libraries that only execution needs
    jax.config.update("jax_platforms", "cpu")


def open_devices(target: Target) -> list[jax.Device]:
    """Return devices that only support compilation; UserError if the compiler is missing."""
    kind = target.kind
    if not has_compiler(target.platform):
        needed = "needs libtpu" if target.platform == "tpu" else "needs jax_cuda12_plugin or jax_cuda13_plugin"
        raise UserError(f'{TARGET} {target.name}: {needed}; run pip install "grpo_jax[targets]"')
    if isinstance(kind, Gpu):
        shape = f"1x1x{target.devices}"
        return list(topologies.get_topology_desc("", "cuda", target_config=_figures(kind), topology=shape).devices)
    shape = kind.shapes.get(target.devices)
    require(shape is not None, f"{TARGET} {target.name}", f"{', '.join(map(str, kind.shapes))} chips", target.devices)
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", f"{target.name}-{target.devices}")
    jax.devices()
    os.environ.pop("XLA_FLAGS", None)  # the CPU has read them; libtpu ends the process at unknown flags
    return list(topologies.get_topology_desc(f"{target.name}:{shape}", "tpu").devices)[: target.devices]


def _figures(kind: Gpu) -> str:
    """Write XLA's `GpuTargetConfigProto` of a GPU as text."""
    figures = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(kind.bandwidth),
        "device_memory_size": kind.memory,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        **dict(zip(kind._fields[5:], kind[5:], strict=True)),
    }
    major, minor = kind.capability
    listed = " ".join(f"{name}: {value}" for name, value in figures.items())
    return (
        f"gpu_device_info {{ {listed} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        f'platform_name: "CUDA" dnn_version_info {{ major: 9 }} device_description_str: "{kind.title}"'
    )


def lowering_for(target: Target) -> AbstractContextManager[None]:
    """Return a context in which Pallas lowers kernels for the target's GPU; from jax 0.12 on it needs a GPU."""
    if not isinstance(target.kind, Gpu) or target.platform != "cuda":
        return nullcontext()
    device = AbstractDevice(f"NVIDIA {_KNOWN[target.kind.capability]}", target.kind.core_count, "gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def compile_for(target: Target, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile lowered programs for the target's devices, without timing kernels."""
    if target.platform == "tpu":
        return lowered.compile()
    try:
        return lowered.compile(compiler_options=_UNTIMED)
    except jax.errors.JaxRuntimeError as error:
        if not any(words in str(error) for words in ("output tile sizes", "No supported config found")):
            raise
        return lowered.compile(compiler_options=_WITHOUT_TRITON)
