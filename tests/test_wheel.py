"""The packages of `make wheel`: their contents, and the wheel installed where there is no compiler and no repository.

They are compiled without optimization, which changes nothing of their contents and is several times as fast.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging import tags
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from ghostnoise.version import __version__

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="auditwheel is for Linux")]

ROOT = Path(__file__).parents[1]
NATIVE = "ghostnoise/engine/native/"
TESTED = (
    "tests/methods/test_ghost_batch_norm.py",
    "tests/conversion/test_convert.py",
    "tests/engine/test_native_operators.py",
)


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The output of the commands of `make wheel`."""
    folder = tmp_path_factory.mktemp("dist")
    environment = os.environ | {"CXXFLAGS": "-O0", "GHOSTNOISE_REQUIRE_NATIVE": "1", "GHOSTNOISE_PORTABLE": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, check=True)
    (built,) = folder.glob("*-py3-none-linux_*.whl")
    repair = [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libtorch*", "--wheel-dir", str(folder)]
    subprocess.run([*repair, str(built)], env=environment, capture_output=True, check=True)
    built.unlink()
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    return path


def requirements(*names):
    """The distributions that these need, and the distributions themselves."""
    found, waiting = {}, list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        for text in found[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found.values()


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """A function that runs the Python of an environment with the wheel, torch and numpy alone, in an empty folder."""
    folder, elsewhere = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("elsewhere")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in requirements("torch", "numpy"):
        for top in {file.parts[0] for file in distribution.files if file.parts[0] not in ("..", "__pycache__")}:
            (packages / top).symlink_to(distribution.locate_file(top))
    install = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--no-index", str(wheel)]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(install, cwd=elsewhere, env=alone, capture_output=True, check=True)
    environment = {"PATH": str(folder / "bin"), "CC": "/bin/false", "CXX": "/bin/false", "HOME": str(elsewhere)}

    def run(*arguments, cwd=elsewhere, **more):
        command = [str(folder / "bin/python"), *arguments]
        return subprocess.run(command, cwd=cwd, env=environment | more, capture_output=True, text=True, check=False)

    return run


def test_the_tag_is_that_of_every_python_on_this_platform(wheel):
    _, _, _, accepted = parse_wheel_filename(wheel.name)
    assert {(tag.interpreter, tag.abi) for tag in accepted} == {("py3", "none")}
    assert all(re.match("manylinux_?20?", tag.platform) for tag in accepted), accepted
    for minor in (11, 12, 13, 14):
        version, platforms = (3, minor), list(tags.platform_tags())
        supported = set(tags.cpython_tags(version, platforms=platforms)) | set(
            tags.compatible_tags(version, f"cp3{minor}", platforms)
        )
        assert accepted & supported, minor


def test_contents(wheel):
    """The library, typing and recipes; no copy of torch, no C++ sources, no tests."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {NATIVE + "_library.so", "ghostnoise/py.typed", "ghostnoise/lab/recipes/digits.toml"} <= names
    assert [name for name in names if ".so" in name] == [NATIVE + "_library.so"]
    assert {name.split("/")[0] for name in names} == {"ghostnoise", f"ghostnoise-{__version__}.dist-info"}
    assert not [name for name in names if name.endswith((".cpp", ".h"))]


def test_the_base_installation_needs_torch_and_numpy_alone(wheel):
    (metadata,) = importlib.metadata.distributions(path=[str(wheel)])
    needed = [Requirement(text) for text in metadata.requires]
    assert {each.name for each in needed if each.marker is None} == {"torch", "numpy"}
    assert all("extra" in str(each.marker) for each in needed if each.marker is not None)


def test_commands_of_the_installed_wheel(python):
    done = python("-m", "ghostnoise", "--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"ghostnoise {__version__}"), done.stderr
    done = python("-m", "ghostnoise", "doctor")
    assert re.search(r"cpu operators +C\+\+", done.stdout), done.stdout + done.stderr


def test_the_installed_library_computes_what_torch_does(python):
    done = python(
        "-c",
        """
import torch, ghostnoise
from ghostnoise.engine import ops
assert ops.MISSING["cpu"] is None, ops.MISSING["cpu"]
x = torch.randn(64, 8, 16, requires_grad=True)
results = []
for ghost_size in (16, None):
    y = ghostnoise.GhostBatchNorm1d(8, ghost_size=ghost_size)(x)
    size = ghost_size or len(x)
    plain = torch.cat([torch.nn.functional.batch_norm(each, None, None, training=True) for each in x.split(size)])
    ours, theirs = ((each, *torch.autograd.grad(each.pow(3).sum(), x)) for each in (y, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
""",
    )
    assert done.returncode == 0, done.stderr


THREADS = """
import os, torch, ghostnoise

def threads():
    return len(os.listdir("/proc/self/task"))

x = torch.randn(64, 32, 1024)
layer = ghostnoise.GhostBatchNorm1d(32, ghost_size=16)
counts = []
for limit in (1, 3):
    torch.set_num_threads(limit)
    before = threads()
    layer(x)
    counts.append(threads() - before)
torch.relu(x)  # needs 3 threads, which are there
print(*counts, threads() - before)
print(torch.__file__)
print(*{line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line}, sep="\\n")
"""


def test_torch_set_num_threads_governs_the_library_which_shares_the_threads_of_torch(python):
    done = python("-c", THREADS)
    assert done.returncode == 0, done.stderr
    counts, torch_file, *loaded = done.stdout.splitlines()
    assert counts == "0 2 2"
    (loaded,) = loaded
    assert Path(loaded).resolve().parent == Path(torch_file).resolve().parent / "lib"


def test_the_sdist_has_every_file_of_the_repository_and_its_tests_run(dist, tmp_path, python):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert not [name for name in listed.splitlines() if (ROOT / name).exists() and not (folder / name).exists()]
    # The tests of the sdist with the library that was built from it: the packages of tests are added after its own.
    command = f"import sys; sys.path += {sys.path!r}; import pytest; sys.exit(pytest.main({['-x', *TESTED]!r}))"
    done = python("-c", command, cwd=folder, PATH=os.environ["PATH"], CXX="c++")
    assert done.returncode == 0, done.stdout + done.stderr
