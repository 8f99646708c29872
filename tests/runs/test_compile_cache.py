"""What one run compiled the next one finds on the disk, unless JAX was told otherwise."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from support.text_task import rows, train_here

from grpo_jax.runs.compile_cache import enable_compile_cache

SETTINGS = ("dir", "max_size")


@pytest.fixture
def untold(monkeypatch):
    """JAX without the cache that the tests share; as it was afterwards."""
    names = [f"jax_compilation_cache_{name}" for name in SETTINGS] + ["jax_persistent_cache_min_compile_time_secs"]
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def forget():
    """What a new process would not know."""
    compilation_cache.reset_cache()
    jax.clear_caches()


def test_a_second_run_compiles_nothing_anew(untold, place, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    short = ["--training.max_steps=1", "--training.save_every=0", "--data.held_out=0", "--evaluation.every=0"]
    found = []
    for number in (1, 2):
        forget()
        assert train_here(place.config, tmp_path / f"run{number}", *short) == 0
        found.append({file.name for file in (tmp_path / "cache").rglob("*-cache")})
    forget()
    assert len(found[0]) > 3 and found[1] == found[0]
    assert rows(tmp_path / "run1") == rows(tmp_path / "run2")


def test_what_jax_was_told_holds(untold, tmp_path):
    home = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert enable_compile_cache(home | {"JAX_COMPILATION_CACHE_DIR": "/mine"}) is None
    assert enable_compile_cache(home | {"JAX_ENABLE_COMPILATION_CACHE": "false"}) is None
    (tmp_path / "file").touch()
    assert enable_compile_cache({"XDG_CACHE_HOME": str(tmp_path / "file")}) is None  # no folder can be made there
    assert jax.config.jax_compilation_cache_dir is None and not (tmp_path / "cache").exists()
    folder = enable_compile_cache(home | {"JAX_COMPILATION_CACHE_MAX_SIZE": "5"})
    assert folder.is_dir() and folder.stat().st_mode & 0o77 == 0
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.3
    assert jax.config.jax_compilation_cache_max_size != 2 * 2**30
    assert enable_compile_cache(home) is None  # it is told now


@pytest.fixture
def kept():
    """An event for each program that is written to the disk."""
    found = []

    def heard(name, **_):
        if name.endswith("cache_misses"):
            found.append(name)

    jax.monitoring.register_event_listener(heard)
    yield found
    jax.monitoring.unregister_event_listener(heard)


@pytest.mark.parametrize("damage", ["flipped", "without its time"])
def test_a_damaged_program_is_compiled_once_and_kept_again(untold, kept, tmp_path, damage):
    home = {"XDG_CACHE_HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    folder = enable_compile_cache(home)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    def start():
        """As a new process would; how many programs it kept."""
        forget()
        before = len(kept)
        jax.jit(lambda value: 2 * value + 1)(3)
        return len(kept) - before

    try:
        assert [start(), start()] == [1, 0]
        (entry,) = folder.glob("jit__lambda*-cache")
        content = bytearray(entry.read_bytes())
        content[len(content) // 2] ^= 1
        if damage == "without its time":
            next(folder.glob("jit__lambda*-atime")).unlink()
        else:
            entry.write_bytes(content)
        assert [start(), start()] == [1, 0]
    finally:
        compilation_cache.reset_cache()


def test_a_folder_that_others_may_write_is_not_used(untold, tmp_path, capsys):
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = enable_compile_cache(home)
    jax.config.update("jax_compilation_cache_dir", None)
    folder.chmod(0o770)
    assert enable_compile_cache(home) is None is enable_compile_cache(home)
    assert jax.config.jax_compilation_cache_dir is None
    line = capsys.readouterr().err
    assert (
        line.startswith(f"note: compiled programs are not kept, since others may write {folder}: ")
        and line.count("\n") == 1
    )
