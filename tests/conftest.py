"""Settings of every test: JAX on CPU, no network, the same examples every time."""

import atexit
import gc
import os
import shutil
import tempfile
from collections import Counter

from support.shared_imports import imports_shared_out
from support.xla import kept_programs, known_flags

# Before jax and the Hugging Face libraries are imported; subprocesses inherit them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Workers and the commands they start find each other's programs, and so does the next session on this machine.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ.get("GRPO_JAX_TEST_CACHE") or str(kept_programs())
    os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="grpo_jax_datasets_")
    atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)
    # Small programs too: a run has a hundred, which each process would compile again for longer than the large ones.
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    if "XLA_FLAGS" not in os.environ:
        os.environ["XLA_FLAGS"] = known_flags()
else:
    # Registered first, called last: to take apart all that was imported and compiled takes many seconds.
    atexit.register(os._exit, 0)
# Of torch, whose threads wait for each other by spinning: beside other workers that is ten times the work
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray reads these when it is imported, which some tests do before the code that sets them
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_RAYLET_PID", str(os.getpid()))
for offline in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ[offline] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Until everything is imported: hundreds of thousands of objects that stay would be walked over again and again.
gc.disable()

if "PYTEST_XDIST_WORKER" in os.environ:
    imports_shared_out()

import jax  # noqa: E402
import jax.experimental  # noqa: E402
import psutil  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("grpo_jax", max_examples=25, deadline=None, derandomize=True, database=None)
settings.load_profile("grpo_jax")


RAY_WARNINGS = (
    "ignore::ResourceWarning",  # Ray leaves log files and sockets to the collector
    "ignore::DeprecationWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


def pytest_collection_modifyitems(config, items):
    """What is marked wide or realmodel runs where it is asked for; Ray's warnings are no errors."""
    for item in items:
        if item.get_closest_marker("ray"):
            for warning in RAY_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))
    unasked = [mark for mark in ("wide", "realmodel") if mark not in config.option.markexpr]
    left_out = [item for item in items if any(map(item.get_closest_marker, unasked))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    # Files of few tests first: theirs are long, and a worker that begins such a file last keeps the others waiting.
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: tests[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Files that train at `place` share compiled programs: one worker has them all."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            text = (config.rootpath / file).read_text()
            return "place" if "place.config" in text or "finished_run(place" in text else file

    return Together(config, log)


def pytest_collection_finish():
    """What is imported stays: the collector need not walk over it again and again while functions are traced."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


def pytest_unconfigure():
    """At the interpreter's end some libraries count what the collector has not taken, and complain.

    A worker, which has sent its results, skips that end, and the collection before it.
    """
    (gc.freeze if "PYTEST_XDIST_WORKER" in os.environ else gc.unfreeze)()


GIB = 2**30
"""After so many more bytes, and 4 GiB in all, a worker lets go of what its modules compiled."""


@pytest.fixture(scope="session")
def memory():
    """What this process may hold, as a list of one number: what it still holds after letting go is none it can free."""
    return [4 * GIB]


@pytest.fixture(scope="module", autouse=True)
def forget_programs(memory, shared_programs):
    """What some modules compiled the next ones find."""
    yield
    process = psutil.Process()
    if process.memory_info().rss > memory[0]:
        shared_programs.clear()
        jax.clear_caches()
        gc.collect()
        memory[0] = max(memory[0], process.memory_info().rss + GIB)


@pytest.fixture(scope="session", autouse=True)
def shared_programs():
    """Runs that would compile the same functions compile them once."""
    from support import programs

    with pytest.MonkeyPatch.context() as patch:
        programs.share(patch)
        yield programs.MADE


@pytest.fixture
def own_programs(shared_programs):
    """The runs of this test begin with functions that nobody has compiled; later ones have the others' again."""
    before = dict(shared_programs)
    shared_programs.clear()
    yield
    shared_programs.update(before)


@pytest.fixture
def rounding():
    """What of torch may round products to TF32, and now does; as it was afterwards."""
    torch = pytest.importorskip("torch")
    parts = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [part.allow_tf32 for part in parts]
    for part in parts:
        part.allow_tf32 = True
    yield parts
    for part, allowed in zip(parts, before, strict=True):
        part.allow_tf32 = allowed


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A task for the commands: policy, prompts, judge and config, one for all test files of a worker."""
    from support.text_task import make_place

    return make_place(tmp_path_factory.mktemp("text_task"))


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


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster on this machine, which this process belongs to; idle it would take a CPU second each minute."""
    ray = pytest.importorskip("ray")
    from bridges import ray_cluster

    ray_cluster.join(None, object_store=256 * 2**20)
    yield
    ray.shutdown()
    gc.collect()  # its processes, which Ray does not wait for, while their warnings are no errors


@pytest.fixture(scope="module")
def no_cluster():
    """This process belongs to none, which it is to start or join itself."""
    ray = pytest.importorskip("ray")
    ray.shutdown()
    yield
    ray.shutdown()
