"""The notebooks are valid, have no outputs, and the cells that need no GPU run."""

import os
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("name", NAMES)


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def needs_gpu(cell):
    return "gpu" in cell.metadata.get("tags", [])


def is_installation(cell):
    return "install" in cell.metadata.get("tags", [])


def test_there_are_two():
    assert NAMES == ["first_steps", "reproduce_a_table"]


@every_notebook
def test_it_is_valid_and_has_no_outputs(name):
    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.cells[0].source.startswith("# ")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
            plain = re.sub(r"^[!%].*$", "pass", cell.source, flags=re.MULTILINE)
            compile(plain, f"{name}.ipynb", "exec")


@every_notebook
def test_it_opens_in_colab_and_installs_from_the_repository(name):
    """OWNER is replaced before the first release, in all places at once."""
    notebook = read(name)
    link = re.search(
        r"\[Open in Colab\]\(https://colab.research.google.com/github/(.*?)/blob/main/(.*?)\)", notebook.cells[0].source
    )
    assert (FOLDER.parents[1] / link[2]).name == f"{name}.ipynb"
    assert (FOLDER.parents[1] / link[2]).is_file()
    (installation,) = filter(is_installation, notebook.cells)
    assert f"@ git+https://github.com/{link[1]}'" in installation.source
    assert f'"https://github.com/{link[1]}"' in (FOLDER.parents[1] / "pyproject.toml").read_text()


def test_only_the_notebook_for_gpus_has_such_cells_and_says_that_they_were_not_executed():
    assert not any(map(needs_gpu, read("first_steps").cells))
    notebook = read("reproduce_a_table")
    assert any(map(needs_gpu, notebook.cells))
    assert "have not been executed" in notebook.cells[0].source


def test_commands_of_cells_that_are_not_executed_are_valid(capsys):
    """Their arguments are accepted by the parser of the command line."""
    from ghostnoise import cli

    commands = [line for cell in read("reproduce_a_table").cells for line in cell.source.splitlines()
                if line.startswith("!ghostnoise ")]  # fmt: skip
    assert len(commands) == 4
    for command in commands:
        options = cli._parse(command.removeprefix("!ghostnoise ").split())
        assert options.command in ("data", "sweep", "report", "runs")


@pytest.mark.slow
@every_notebook
def test_it_runs(name, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("GHOSTNOISE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parent / "startup"), os.environ.get("PYTHONPATH", "")])
    )
    notebook = read(name)
    notebook.cells = [cell for cell in notebook.cells if not needs_gpu(cell) and not is_installation(cell)]
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert ("difference" in text) if name == "first_steps" else ("table2-c10" in text)
