"""The package as a whole: its public names, and the direction of its imports."""

import ast
import graphlib
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import ghostnoise
from ghostnoise.methods import registry

SOURCE = Path(ghostnoise.__file__).parent
# The layers of the library, from the top. A module imports from the layers below its own, or from its own. The lab is
# beside the library: only commands import it, and it imports any part of the library.
LAYERS = [
    ["__main__"],
    ["cli", "bench"],
    ["doctor"],
    ["meter", "calibration"],
    ["inference"],
    ["conversion"],
    ["functional"],
    ["methods"],
    ["flex", "masking", "history", "laws"],
    ["engine"],
    ["randomness", "tracing", "chi_square"],
    ["tables"],
    ["checks"],
    ["torch_private", "terminal"],
    ["docstrings", "text", "version"],
]
DEPTH = {part: depth for depth, parts in enumerate(LAYERS) for part in parts}
COMMANDS = {"cli", "bench"}


def modules():
    """Return the paths of all modules by name."""
    names = {}
    for path in SOURCE.rglob("*.py"):
        parts = ["ghostnoise", *path.relative_to(SOURCE).with_suffix("").parts]
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported_names(path):
    """Yield the names that a file imports from the package when it is imported itself."""

    def visit(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "ghostnoise":
                yield from (f"{child.module}.{alias.name}" for alias in child.names)
            elif isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names if alias.name.split(".")[0] == "ghostnoise")
            else:
                yield from visit(child)

    yield from visit(ast.parse(path.read_text()))


def import_graph():
    """Return, for each module, the modules that it imports: a name of a package, or the package itself."""
    known = modules()
    return {
        name: {each if each in known else each.rpartition(".")[0] for each in imported_names(path)} - {name}
        for name, path in known.items()
    }


def part(name):
    return name.split(".")[1]


def test_imports_point_down():
    wrong = []
    for name, imports in import_graph().items():
        if name == "ghostnoise" or part(name) == "lab":
            continue
        assert part(name) in DEPTH, f"{name} has no place in the layers"
        for there in {part(each) for each in imports if each != "ghostnoise"} - {part(name)}:
            allowed = part(name) in COMMANDS if there == "lab" else DEPTH.get(there, -1) > DEPTH[part(name)]
            if not allowed:
                wrong.append(f"{name} imports {there}")
    assert wrong == []


def test_there_are_no_import_cycles():
    # The package's own __init__ imports nothing until a name is used.
    graph = {name: imports - {"ghostnoise"} for name, imports in import_graph().items()}
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        raise AssertionError(f"import cycle: {' -> '.join(error.args[1])}") from None


def test_every_public_name_is_there():
    for name in ghostnoise.__all__:
        assert getattr(ghostnoise, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ghostnoise.nothing


def test_dir_lists_public_names_only():
    assert dir(ghostnoise) == sorted([*ghostnoise.__all__, "__version__"])
    assert set(registry.layers()) <= set(dir(ghostnoise))
    modules = {"functional", "meter", "tables"}
    assert modules | {"flex_norm", "convert", "revert", "summary", "Meter"} <= set(dir(ghostnoise))


def test_names_of_methods_are_those_of_the_registry():
    for name, layer in registry.layers().items():
        assert getattr(ghostnoise, name) is layer
    assert ghostnoise.decompose is registry.functions()["decompose"]


def test_import_loads_no_torch_until_a_name_is_used():
    """And no compiler then, which takes longer to import than torch."""
    code = """
import sys, ghostnoise
assert 'torch' not in sys.modules
ghostnoise.GhostNoise, ghostnoise.convert, ghostnoise.flex_norm
assert 'torch._dynamo' not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_import_takes_little_more_than_that_of_torch():
    """At most 0.1 s, in the median of 7 processes; processor time, so that other processes do not count."""
    code = """
import time, torch
before = time.process_time()
import ghostnoise
print(time.process_time() - before)
"""
    runs = (subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True) for _ in range(7))
    assert statistics.median(float(run.stdout) for run in runs) <= 0.1


def test_the_library_needs_torch_and_numpy_alone():
    """With everything that the extras bring made unimportable, every public name still loads and runs."""
    code = """
import sys
extras = "scipy sklearn matplotlib rich pandas ray triton timm torchvision pydantic filelock tensorboard"
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
