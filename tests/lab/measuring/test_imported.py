"""Functions of the user's, by name."""

import sys

import pytest

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.measuring.imported import imported

SOURCE = """
number = 3
def seven():
    return 7
class Nets:
    @staticmethod
    def eight():
        return 8
def needs(argument):
    return argument
def fails():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the current folder, of a name that no other test has imported."""
    name = f"of_the_user_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    yield name
    sys.modules.pop(name, None)


def test_it_is_found_in_the_current_folder_and_called(module):
    assert imported(f"{module}:seven") == 7
    assert imported(f"{module}:Nets.eight") == 8


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("missing", "has no 'missing'; give the name of a function in it"),
        ("number", "is a int: must be a function; give one that returns it"),
        ("needs", r"\(\) failed \(TypeError: .*\); it must run without arguments"),
        ("fails", r"\(\) failed \(RuntimeError: no weights here\); it must run without arguments"),
    ],
)
def test_what_is_no_function_is_refused(module, function, said):
    with pytest.raises(UserError, match=said):
        imported(f"{module}:{function}")


def test_a_module_that_is_not_there_or_breaks_is_refused(module, tmp_path):
    with pytest.raises(
        UserError, match=r"'nowhere_at_all' cannot be imported .*; start where it lies, or set PYTHONPATH"
    ):
        imported("nowhere_at_all:f")
    broken = f"{module}_broken"
    (tmp_path / f"{broken}.py").write_text("1 / 0")
    with pytest.raises(UserError, match="ZeroDivisionError: division by zero"):
        imported(f"{broken}:f")
