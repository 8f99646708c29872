"""Two judges that need different versions of one package, each in a pool with an interpreter of its own."""

import shutil
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("ray")

from grpo_jax.config import make_config

pytestmark = [pytest.mark.slow, pytest.mark.ray]

ODD = Path(__file__).with_name("odd_judges.py")
LITTLE = """
__version__ = "{version}"

def score(texts):
    return [{version} * len(text) for text in texts]
"""


def make_interpreter(folder, version):
    """An environment of this Python with all that this one has, and a package of its own version."""
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "little.py").write_text(LITTLE.format(version=version))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return str(folder / "bin" / Path(sys.executable).name)


def test_judges_that_need_different_versions_of_a_package_judge_side_by_side(cluster, tmp_path):
    judges = {
        f"judge{version}": {
            "kind": f"{ODD}:Versioned",
            "replicas": 1,
            "runtime_env": {"py_executable": make_interpreter(tmp_path / version, version)},
        }
        for version in ("1", "2")
    }
    config = make_config(task="text", judges=judges)
    loaded = {}
    try:
        for name, judge in config.judges.items():
            judge.check()  # which this process could not
            loaded[name] = judge.load("cpu")
        assert loaded["judge1"].score(["ab", "c"]) == [2, 1] and loaded["judge2"].score(["ab", "c"]) == [4, 2]
        with pytest.raises(ModuleNotFoundError):
            config.judges["judge1"].judge.load("cpu")
    finally:
        for one in loaded.values():
            one.close()


def make_wheel(folder, version):
    """The package as a wheel, for pip to install without a network."""
    about = f"little-{version}.dist-info"
    files = {
        "little.py": LITTLE.format(version=version),
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: little\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{about}/RECORD"))
    path = folder / f"little-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return str(path)


@pytest.mark.wide
def test_a_judge_has_the_packages_that_ray_installs_for_it(cluster, tmp_path):
    pip = {"packages": [make_wheel(tmp_path, "3")], "pip_install_options": ["--no-index", "--no-cache-dir"]}
    judge = {"kind": f"{ODD}:Versioned", "replicas": 1, "runtime_env": {"pip": pip}}
    try:
        loaded = make_config(task="text", judges={"judge": judge}).judges["judge"].load("cpu")
        assert loaded.score(["ab", "c"]) == [6, 3]
        loaded.close()
    finally:  # Ray's copy of all packages would stay after its cluster
        shutil.rmtree(Path("/tmp/ray", cluster.cluster_session(), "runtime_resources", "pip"), ignore_errors=True)
