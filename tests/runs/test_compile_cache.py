"""The cache of compiled programs: a second run finds those of the first, unless JAX's settings differ."""

import os

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from grpo_jax.config.run import make_config
from grpo_jax.errors import UserError
from grpo_jax.runs import compile_cache
from grpo_jax.runs.compile_cache import enable_compile_cache
from grpo_jax.train import run


@pytest.fixture
def untold():
    """JAX without the cache that the tests share; as it was afterwards."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (None, 5.0), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_settings_of_jax_take_precedence(untold, tmp_path, capsys):
    home = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert enable_compile_cache(home | {"JAX_COMPILATION_CACHE_DIR": "/mine"}) is None
    assert enable_compile_cache(home | {"JAX_ENABLE_COMPILATION_CACHE": "false"}) is None
    (tmp_path / "file").touch()
    assert enable_compile_cache({"XDG_CACHE_HOME": str(tmp_path / "file")}) is None  # no folder can be made there
    assert jax.config.jax_compilation_cache_dir is None and not (tmp_path / "cache").exists()
    folder = enable_compile_cache(home | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "5"})
    assert folder.is_dir() and folder.stat().st_mode & 0o77 == 0
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 5.0
    assert enable_compile_cache(home) is None  # it is told now
    jax.config.update("jax_compilation_cache_dir", None)
    folder.chmod(0o770)
    assert enable_compile_cache(home) is None is jax.config.jax_compilation_cache_dir
    told = f"warning: compiled programs are not kept, since others may write {folder}: "
    assert capsys.readouterr().err.startswith(told)


def test_the_latest_programs_are_found_again(untold, tmp_path, monkeypatch):
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.delenv(name)  # small programs are kept too
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "run").touch()
    config = make_config(task="text", policy={"path": "policy"}, rewards=["length"], run_dir=str(tmp_path / "run"))
    written = []

    def count(name, **_):
        if name.endswith("cache_misses"):
            written.append(name)

    def start() -> int:
        """Compile as a new process would, behind a run's start; return how many programs it wrote."""
        compilation_cache.reset_cache()
        jax.clear_caches()
        jax.config.update("jax_compilation_cache_dir", None)
        with pytest.raises(UserError, match="run is a file"):
            run(config)
        before = len(written)
        jax.jit(lambda value: 2 * value + 1)(3)
        return len(written) - before

    jax.monitoring.register_event_listener(count)
    try:
        assert [start(), start()] == [1, 0]
        programs = [*tmp_path.rglob("*-cache")]
        monkeypatch.setattr(compile_cache, "MOST_PROGRAMS", len(programs))
        newer = programs[0].with_name("newer-cache")
        newer.touch()
        os.utime(next(tmp_path.rglob("jit__lambda*-cache")), (1, 1))
        assert start() == 1 and newer.is_file()
    finally:
        jax.monitoring.unregister_event_listener(count)
        compilation_cache.reset_cache()
