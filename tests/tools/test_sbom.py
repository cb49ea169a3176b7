"""The bill of materials of a wheel, validated by the schema of CycloneDX."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = b"\x7fELF library"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel with the requirements of the installed package, and with a compiled library."""
    from importlib import metadata

    path = tmp_path_factory.mktemp("dist") / "ghostnoise-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ghostnoise/__init__.py", "")
        archive.writestr("ghostnoise/engine/_library.so", LIBRARY)
        archive.writestr("ghostnoise-0.1.0.dist-info/METADATA", str(metadata.metadata("ghostnoise")))
    return path


@pytest.fixture(scope="module")
def bill(wheel):
    done = subprocess.run([sys.executable, ROOT / "tools" / "sbom.py", wheel], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{wheel}.cdx.json\n"
    return Path(f"{wheel}.cdx.json").read_text()


def test_it_is_valid_cyclonedx(bill):
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(bill) is None
    assert validator.validate_str(bill.replace('"CycloneDX"', '"other"')) is not None


def test_the_wheel_and_its_libraries_have_their_checksums(bill, wheel):
    made = json.loads(bill)["metadata"]["component"]
    assert made["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    assert made["licenses"] == [{"expression": "Apache-2.0"}]
    (library,) = made["components"]
    assert library["name"] == "ghostnoise/engine/_library.so"
    assert library["hashes"][0]["content"] == hashlib.sha256(LIBRARY).hexdigest()


def test_all_packages_are_there_with_pinned_versions(bill):
    parts = {each["name"].lower().replace("_", "-"): each for each in json.loads(bill)["components"]}
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.partition(";")[0].strip().lower().replace("_", "-").split("==") for line in constraints)
    assert {"torch", "numpy", "sympy"} <= {name for name, each in parts.items() if each["scope"] == "required"}
    assert {"pydantic", "ray", "contourpy"} <= {name for name, each in parts.items() if each["scope"] == "optional"}
    assert "pytest" not in parts, "it is only for developing"
    assert {name: each["version"] for name, each in parts.items()} == {name: pinned[name] for name in parts}
    assert all(each["licenses"] for each in parts.values())


def test_the_graph_has_what_the_packages_require(bill):
    from importlib import metadata

    graph = {each["ref"]: set(each["dependsOn"]) for each in json.loads(bill)["dependencies"]}
    assert all(refs <= graph.keys() for refs in graph.values())
    (torch,) = (ref for ref in graph if ref.startswith("pkg:pypi/torch@"))
    names = {Requirement(text).name for text in metadata.requires("torch") if "extra" not in text}
    assert {ref.removeprefix("pkg:pypi/").partition("@")[0] for ref in graph[torch]} <= {
        name.lower().replace("_", "-") for name in names
    }
    assert len(graph[torch]) > 3


def test_the_same_wheel_gives_the_same_file(bill, wheel):
    subprocess.run([sys.executable, ROOT / "tools" / "sbom.py", wheel], check=True, capture_output=True)
    assert Path(f"{wheel}.cdx.json").read_text() == bill
