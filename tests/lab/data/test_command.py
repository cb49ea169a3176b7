import io
from dataclasses import replace

import pytest
from rich.console import Console

from ghostnoise.lab.data import catalog, command
from ghostnoise.lab.errors import UserError
from lab.data.writing import described, small, write


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=80)


@pytest.fixture
def mnist(monkeypatch):
    entry, arrays = small("mnist")
    monkeypatch.setitem(catalog.CATALOG, "mnist", entry)
    return entry, arrays


@pytest.fixture
def cifar(monkeypatch):
    entry, arrays = small("cifar10")
    monkeypatch.setitem(catalog.CATALOG, "cifar10", entry)
    return entry, arrays


def said(console):
    return console.file.getvalue()


def test_listing(tmp_path, mnist, cifar):
    entry, arrays = mnist
    write(entry.layouts[0], arrays, tmp_path / "MNIST" / "raw")
    write(cifar[0].layouts[1], cifar[1], tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(b"damaged")
    (tmp_path / "cifar-100-python").mkdir()
    rows = {row.name: row for row in command.listing(tmp_path)}
    assert list(rows) == ["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "imagefolder"]
    size = sum(file.size for file in entry.layouts[0].files(("train", "test")))
    assert rows["mnist"] == command.Row("mnist", 70, 10, (1, 28, 28), size, "MNIST/raw/")
    assert rows["digits"].where == "embedded"
    assert rows["fashion-mnist"].where == "not here"
    assert rows["fashion-mnist"].size == 30_878_645
    assert rows["cifar10"].where == "cifar-10-batches-py/ damaged"
    assert rows["cifar100"].where == "not here"
    (tmp_path / "cifar-10-batches-py" / "test_batch").unlink()
    assert command.listing(tmp_path)[3].where == "cifar-10-batches-py/ incomplete"


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_is_readable(tmp_path, mnist, cifar, width):
    write(cifar[0].layouts[0], cifar[1], tmp_path / "cifar-10-batches-bin")
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(b"damaged")
    console = Console(file=io.StringIO(), width=width)
    assert command.run("list", None, tmp_path, console) == 0
    lines = said(console).splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in said(console)
    (line,) = [line for line in lines if "fashion-mnist" in line]
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "fashion-mnist",
        "70,000",
        "10",
        "1×28×28",
        "31",
        "not here",
    ]
    (line,) = [line for line in lines if "cifar10 " in line]
    assert "cifar-10-batches-bin/" in line
    assert "damaged" in said(console)


def test_a_list_of_a_folder_that_is_not_there(tmp_path, console):
    assert command.run("list", None, tmp_path / "absent", console) == 0
    assert said(console).count("not here") == 4
    assert not (tmp_path / "absent").exists()


def test_verify(tmp_path, mnist, console):
    entry, arrays = mnist
    with pytest.raises(UserError, match="mnist: no train or test images in"):
        command.run("verify", "mnist", tmp_path, console)
    write(entry.layouts[0], arrays, tmp_path / "mnist", zipped=True)
    assert command.run("verify", "mnist", tmp_path, console) == 0
    assert said(console) == f"mnist: whole in {tmp_path}/mnist, 4 files with the published md5\n"
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"")
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte\.gz: damaged"):
        command.run("verify", "mnist", tmp_path, console)


def test_get_of_what_is_there_verifies_it(tmp_path, mnist, console):
    entry, arrays = mnist
    write(entry.layouts[0], arrays, tmp_path / "mnist")
    assert command.run("get", "mnist", tmp_path, console) == 0
    assert "mnist: whole in" in said(console)


def test_get_downloads(tmp_path, tmp_path_factory, mnist, console, monkeypatch, server):
    entry, arrays = mnist
    source = tmp_path_factory.mktemp("zipped") / "mnist"
    write(entry.layouts[0], arrays, source, zipped=True)
    server.contents = {path.name: path.read_bytes() for path in source.iterdir()}
    downloads = tuple(described(file.name, server.contents[file.name]) for file in entry.layouts[0].downloads)
    layout = replace(entry.layouts[0], downloads=downloads, addresses=(server.address,))
    monkeypatch.setitem(catalog.CATALOG, "mnist", replace(entry, layouts=(layout,)))
    assert command.run("get", "mnist", tmp_path / "new", console) == 0
    assert len(server.requests) == 4
    assert command.run("get", "mnist", tmp_path / "new", console) == 0
    assert len(server.requests) == 4
    assert said(console).count(f"mnist: whole in {tmp_path}/new/mnist") == 2


def test_the_folder_of_the_environment(tmp_path, mnist, console, monkeypatch):
    write(mnist[0].layouts[0], mnist[1], tmp_path / "mnist")
    monkeypatch.setenv("GHOSTNOISE_DATA", str(tmp_path))
    assert command.run("verify", "mnist", None, console) == 0


@pytest.mark.parametrize("action", ["get", "verify"])
def test_digits_are_embedded(tmp_path, action, console):
    assert command.run(action, "digits", tmp_path, console) == 0
    assert "digits: embedded in scikit-learn" in said(console)


def test_refusals(tmp_path, console):
    for action, name, text in (
        ("get", "imagefolder", r"nothing to get; lay them out as train/CLASS/\*.jpg"),
        ("verify", "imagefolder", "nothing to verify"),
        ("get", "cifar", "cifar: no such data set; .*did you mean cifar1"),
        ("verify", None, "data verify without a name: there are digits"),
        ("remove", "mnist", "data remove: must be one of list, get, verify"),
    ):
        with pytest.raises(UserError, match=text):
            command.run(action, name, tmp_path, console)
    assert said(console) == ""
