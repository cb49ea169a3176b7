import io
from dataclasses import replace

import pytest
from rich.console import Console

from ghostnoise import cli
from ghostnoise.cli import data
from ghostnoise.lab.data import catalog, download
from ghostnoise.lab.errors import UserError
from support.datasets import described, small, write


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


def called(capsys, *words, folder):
    """What `ghostnoise data` prints."""
    assert cli.main(["data", *words, "--data-dir", str(folder)]) == 0
    return capsys.readouterr().out


def test_listing(tmp_path, mnist, cifar):
    entry, arrays = mnist
    write(entry.layout, arrays, tmp_path / "MNIST" / "raw")
    write(cifar[0].layout, cifar[1], tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(b"damaged")
    (tmp_path / "cifar-100-python").mkdir()
    rows = {row.name: row for row in data.listing(tmp_path)}
    assert list(rows) == ["mnist1d", "digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "imagefolder"]
    size = sum(file.size for file in entry.layout.files(("train", "test")))
    assert rows["mnist"] == data.Listed("mnist", 70, 10, (1, 28, 28), size, "MNIST/raw/")
    assert rows["digits"].where == "included in scikit-learn"
    assert rows["mnist1d"] == data.Listed("mnist1d", 10_000, 10, (1, 40), None, "generated")
    assert rows["fashion-mnist"].where == "not found"
    assert rows["fashion-mnist"].size == 30_878_645
    assert rows["cifar10"].where == "cifar-10-batches-py/ damaged"
    assert rows["cifar100"].where == "not found"
    (tmp_path / "cifar-10-batches-py" / "test_batch").unlink()
    assert {row.name: row for row in data.listing(tmp_path)}["cifar10"].where == "cifar-10-batches-py/ incomplete"


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_is_readable(tmp_path, mnist, cifar, width):
    write(cifar[0].layout, cifar[1], tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(b"damaged")
    console = Console(file=io.StringIO(), width=width)
    console.print(data.table(data.listing(tmp_path), tmp_path))
    text = console.file.getvalue()
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text
    (line,) = [line for line in lines if "fashion-mnist" in line]
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "fashion-mnist",
        "70,000",
        "10",
        "1×28×28",
        "31",
        "not found",
    ]
    (line,) = [line for line in lines if "mnist1d" in line]
    assert [cell.strip() for cell in line.strip("│").split("│")] == ["mnist1d", "10,000", "10", "1×40", "", "generated"]
    (line,) = [line for line in lines if "cifar10 " in line]
    assert "cifar-10-batches-py/" in line
    assert "damaged" in text


def test_a_list_of_a_folder_that_does_not_exist(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = called(capsys, "list", folder=tmp_path / "absent")
    assert out.count("not found") == 4
    assert "fashion-mnist" in out
    assert not (tmp_path / "absent").exists()


def test_verify(tmp_path, mnist, capsys):
    entry, arrays = mnist
    with pytest.raises(UserError, match="mnist: no train or test images in"):
        data.verify("mnist", tmp_path)
    write(entry.layout, arrays, tmp_path / "mnist", zipped=True)
    out = called(capsys, "verify", "mnist", folder=tmp_path)
    assert out == f"mnist: complete in {tmp_path}/mnist, 4 files with the published md5 checksums\n"
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"")
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte\.gz: damaged"):
        data.verify("mnist", tmp_path)


def test_get_verifies_a_complete_data_set(tmp_path, mnist, capsys):
    entry, arrays = mnist
    write(entry.layout, arrays, tmp_path / "mnist")
    assert "mnist: complete in" in called(capsys, "get", "mnist", folder=tmp_path)


def test_get_downloads_a_data_set_once(tmp_path, tmp_path_factory, mnist, capsys, monkeypatch, server):
    monkeypatch.setattr(download, "SCHEMES", download.SCHEMES | {"http"})
    entry, arrays = mnist
    source = tmp_path_factory.mktemp("zipped") / "mnist"
    write(entry.layout, arrays, source, zipped=True)
    server.contents = {path.name: path.read_bytes() for path in source.iterdir()}
    downloads = tuple(described(file.name, server.contents[file.name]) for file in entry.layout.downloads)
    layout = replace(entry.layout, downloads=downloads, addresses=(server.address,))
    monkeypatch.setitem(catalog.CATALOG, "mnist", replace(entry, layout=layout))
    for _ in range(2):
        out = called(capsys, "get", "mnist", folder=tmp_path / "new")
        assert f"mnist: complete in {tmp_path}/new/mnist" in out
        assert len(server.requests) == 4


def test_the_folder_of_the_environment(tmp_path, mnist, monkeypatch):
    write(mnist[0].layout, mnist[1], tmp_path / "mnist")
    monkeypatch.setenv("GHOSTNOISE_DATA", str(tmp_path))
    assert cli.main(["data", "verify", "mnist"]) == 0


@pytest.mark.parametrize("action", ["get", "verify"])
def test_digits_need_no_files(tmp_path, action, capsys):
    out = called(capsys, action, "digits", folder=tmp_path)
    assert out == "digits: included in scikit-learn; no files are needed\n"


@pytest.mark.parametrize("action", ["get", "verify"])
def test_mnist1d_needs_no_files(tmp_path, action, capsys):
    out = called(capsys, action, "mnist1d", folder=tmp_path)
    assert out == "mnist1d: generated; no files are needed\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["get", "imagefolder"], "cannot be downloaded; arrange them as train/CLASS/*.jpg"),
        (["verify", "imagefolder"], "have no published checksums"),
        (["get", "cifar"], "did you mean cifar1"),
        (["verify", "cifar"], "cifar: unknown data set"),
        (["get"], "get without a name: must be one of mnist1d, digits, mnist, "),
        (["verify", "mnist"], "train-images-idx3-ubyte"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, capsys, words, line):
    assert cli.main(["data", *words, "--data-dir", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert line in err
    assert err.count("\n") == 1


def test_an_unknown_action_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["data", "remove", "mnist"])
    assert exit_.value.code == 2
    assert "invalid choice: 'remove'" in capsys.readouterr().err
