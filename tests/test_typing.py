"""What type checkers and editors see: every public name with its signature, without running code."""

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ghostnoise
from ghostnoise.methods import registry
from support.scripts import load

SOURCE = Path(ghostnoise.__file__).parent
CLIENTS = Path(__file__).parent / "clients"
ACCEPTED, REFUSED = CLIENTS / "accepted.py", CLIENTS / "refused.py"


def mypy(folder, *files):
    """Return the lines of files in this folder in which `mypy --strict` reports errors, with these."""
    options = ("--strict", "--follow-imports=silent", "--no-error-summary", "--hide-error-context", "--no-pretty")
    command = [sys.executable, "-m", "mypy", *options, "--config-file=", f"--cache-dir={folder}", *files]
    environment = os.environ | {"MYPYPATH": str(SOURCE.parent)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^(.+?):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    return [(Path(path).name, int(line), message) for path, line, message in found]


def pyright(folder, *files):
    """Return the same of pyright, with its default settings."""
    config = {"include": files, "extraPaths": [str(SOURCE.parent)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        "--project",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == len(files)
    return [
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1, each["message"])
        for each in found["generalDiagnostics"]
        if each["severity"] == "error"
    ]


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_checkers_accept_correct_code_and_refuse_mistakes(checker, tmp_path):
    for client in (ACCEPTED, REFUSED):
        shutil.copy(client, tmp_path)
    found = checker(tmp_path, ACCEPTED.name, REFUSED.name)
    assert [each for each in found if each[0] == ACCEPTED.name] == []
    lines = REFUSED.read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# refused")}
    assert len(wrong) > 20
    assert {line for _, line, _ in found} == wrong, found


def test_accepted_code_runs():
    subprocess.run([sys.executable, ACCEPTED], check=True)


def imported(path):
    """Return what a file imports for type checkers: names, with the modules that they come from."""
    blocks = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    statements = [each for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING" for each in block.body]
    assert all(isinstance(each, ast.ImportFrom) for each in statements)
    names = [(alias.name, alias.asname, each.module) for each in statements for alias in each.names]
    assert all(name == again for name, again, _ in names)  # else checkers do not export them
    found = {name: module for name, _, module in names}
    assert len(found) == len(names)
    return found


@pytest.mark.parametrize("name", ["ghostnoise", "ghostnoise.functional"])
def test_checkers_see_the_names_that_exist_at_run_time(name):
    module = importlib.import_module(name)
    path = SOURCE / "__init__.py" if name == "ghostnoise" else Path(module.__file__)
    typed = imported(path)
    assert typed.keys() == set(module.__all__)
    for each, home in typed.items():
        value = importlib.import_module(f"{home}.{each}") if home == "ghostnoise" else None
        assert getattr(module, each) is (value or getattr(importlib.import_module(home), each))


def test_generated_code_is_up_to_date():
    """The registry is the only list of methods; after a change, run `python tools/exports.py`."""
    for path, text in load("exports").files().items():
        assert path.read_text() == text, f"{path} is out of date: run `python tools/exports.py`"


def test_generated_code_follows_a_new_method(monkeypatch):
    class Options:
        def __init__(self, num_features: int, *, strength: float | None = None, generator: object = None) -> None: ...

    exports = load("exports")
    monkeypatch.setattr(registry, "names", lambda: {"new": (registry.MethodSpec(*"nlted", norm=Options), {})})
    assert exports._options() == ["generator: object", "strength: float | None"]
    made = type("Made", (), {"__module__": "ghostnoise.methods.made"})
    monkeypatch.setattr(registry, "exports", lambda: {"Made": made})
    assert exports._imports(["Made"]) == ["from ghostnoise.methods.made import Made as Made"]
    assert exports._replaced(f"a\n  {exports.BEGIN}  old\n  {exports.END}\nb", ["x", "y"]) == (
        f"a\n  {exports.BEGIN}  x\n  y\n  {exports.END}\nb"
    )
    with pytest.raises(SystemExit, match="is missing: add these markers"):
        exports._replaced("a\nb", ["x"])
