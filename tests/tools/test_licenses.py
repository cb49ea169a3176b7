"""docs/licenses.md is what the installed packages declare."""

import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest

from support.scripts import load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def licenses():
    return load("licenses")


@pytest.mark.skipif(sys.platform != "linux", reason="some packages are pinned for Linux only")
def test_the_page_is_that_of_the_installed_packages(licenses):
    assert (ROOT / "docs" / "licenses.md").read_text() == licenses.page(), "run python tools/licenses.py"


def test_every_package_has_a_license():
    rows = [line for line in (ROOT / "docs" / "licenses.md").read_text().splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len((ROOT / "constraints.txt").read_text().splitlines())
    for row in rows:
        name, version, declared, _ = (cell.strip() for cell in row.strip("|").split("|"))
        assert name, row
        assert version, row
        assert declared not in ("", "not declared", "UNKNOWN"), row


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([("License-Expression", "MIT OR Apache-2.0"), ("License", "other")], "MIT OR Apache-2.0"),
        ([("License", "Apache 2.0")], "Apache-2.0"),
        ([("License", "UNKNOWN"), ("Classifier", "License :: OSI Approved :: MIT License")], "MIT"),
        ([("License", "A long\ntext"), ("Classifier", "License :: OSI Approved :: BSD License")], "BSD"),
        ([("Classifier", "License :: OSI Approved"), ("License", "The license\nof ours")], "The license"),
        ([], "not declared"),
    ],
)
def test_licenses_are_read_from_metadata(licenses, fields, expected):
    package = Message()
    for name, value in fields:
        package[name] = value
    assert licenses.license_of(package) == expected


def test_the_tool_starts_from_any_folder(tmp_path):
    code = f"import runpy; runpy.run_path({str(ROOT / 'tools' / 'licenses.py')!r})"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True).returncode == 0
