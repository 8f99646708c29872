"""What every test runs under: JAX on CPU, nothing from the network, the same examples every time."""

import gc
import os

# Before jax and the Hugging Face libraries are imported; subprocesses inherit them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # a test that counts compilations must see them all
for offline in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ[offline] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import jax  # noqa: E402
import jax.experimental  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("grpo_jax", max_examples=25, deadline=None, derandomize=True, database=None)
settings.load_profile("grpo_jax")


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """What a module compiled the next one does not need; all of it together is gigabytes in each worker."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def shared_programs(tmp_path_factory):
    """Runs of one module find each other's compiled programs in a folder: compiling takes most of a tiny run's time."""
    from jax.experimental.compilation_cache import compilation_cache

    wanted = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def strict():
    """Any implicit change of dtype is an error."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def x64():
    """float64 is float64."""
    with (jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64)(True):  # before jax 0.8
        yield
