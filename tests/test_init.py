"""The package as a whole: its public names, and the direction of its imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ghostnoise

SOURCE = Path(ghostnoise.__file__).parent
# A batch walks down this list. A module imports from below it only, or from its own room. The lab stands beside the
# library: the commands at the top of the walk run it, and it imports any of the library.
WALK = [
    "__main__", "cli", "bench", "doctor", "meter", "conversion", "layers", "functional", "engine", "distributed",
    "methods", "laws", "ghosts", "moments",
]  # fmt: skip
COMMANDS = {"cli", "bench"}
ANYWHERE = {"checks", "element", "randomness", "text", "tracing", "weights"}  # outside the walk, and below it


def room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ghostnoise"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("ghostnoise")]
        yield from (name.split(".")[1] for name in names if "." in name)


def modules():
    return [path for path in SOURCE.rglob("*.py") if room(path) not in ("__init__", "lab")]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_forward(path):
    here = room(path)
    for there in set(imported_rooms(path)) - {here}:
        assert there != "lab" or here in COMMANDS, "the library never imports the lab"
        if there == "lab":
            continue
        if here in ANYWHERE:
            assert there in ("checks", "randomness", "tracing")
        elif there not in ANYWHERE:
            assert WALK.index(there) > WALK.index(here), f"{here} imports {there}, which comes before it"


def test_every_module_has_a_place_on_the_walk():
    assert {room(path) for path in modules()} == {*WALK, *ANYWHERE}


def test_every_public_name_is_there():
    for name in ghostnoise.__all__:
        assert getattr(ghostnoise, name) is not None
        assert name in dir(ghostnoise)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ghostnoise.nothing


def test_import_loads_no_torch_until_a_name_is_used():
    """And no compiler then, which takes longer to import than torch."""
    code = """
import sys, ghostnoise
assert 'torch' not in sys.modules
ghostnoise.GhostNoise, ghostnoise.convert
assert 'torch._dynamo' not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_library_needs_torch_and_numpy_alone():
    """With everything that the extras bring made unimportable, every public name still loads and runs."""
    code = """
import sys
extras = "scipy sklearn matplotlib rich pandas ray triton timm torchvision pydantic filelock plotly tensorboard"
for name in extras.split():
    sys.modules[name] = None
import torch, ghostnoise
for name in ghostnoise.__all__:
    getattr(ghostnoise, name)
ghostnoise.AnalyticalGhostNoiseBatchNorm1d(3, ghost_size=4)(torch.randn(8, 3)).sum().backward()
model = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
ghostnoise.revert(ghostnoise.convert(model, "gni", 4))(torch.randn(8, 3))
with ghostnoise.Meter(model, 4) as meter: model(torch.randn(8, 3))
ghostnoise.meter.advise(meter.result()), meter.result().rows()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_version_is_the_installed_one():
    from importlib.metadata import version

    assert version("ghostnoise") == ghostnoise.__version__
