"""Write the software bill of materials of wheels: CycloneDX 1.6 in JSON, beside each wheel.

    python tools/sbom.py dist/*.whl     # writes dist/NAME.whl.cdx.json

It has the wheel with its checksum, the compiled libraries in it, and the packages that pip installs with it: those that
ghostnoise requires (scope "required") and those of its extras ("optional"), with the versions that constraints.txt
pins, their licenses as far as they are installed here, and which package needs which. The same wheel gives the same
file.
"""

import argparse
import hashlib
import json
import sys
import uuid
import zipfile
from collections.abc import Iterable
from datetime import UTC, datetime
from email import message_from_bytes
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from licenses import license_of, needs
from lock import CONSTRAINTS, normalized, pins

Tree = dict[str, Any]
LIBRARIES = (".so", ".dll", ".dylib", ".pyd")
NOT_USED = ("dev",)  # extras that are not for users
SPACE = uuid.UUID("2f1f0f0e-6c0b-5d3f-9a57-6f4c1d7a1c55")  # of the serial numbers


def bill(wheel: Path) -> Tree:
    """Return the bill of materials of a wheel."""
    content = wheel.read_bytes()
    checksum = hashlib.sha256(content).hexdigest()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        about = message_from_bytes(archive.read(name))
        newest = max(info.date_time for info in archive.infolist())
        libraries = {
            each: hashlib.sha256(archive.read(each)).hexdigest()
            for each in sorted(archive.namelist())
            if each.endswith(LIBRARIES)
        }
    made = package(about["Name"], about["Version"], about)
    made |= {"type": "library", "hashes": [sha256(checksum)], "description": about["Summary"]}
    made |= {"components": [library(path, found) for path, found in libraries.items()]} if libraries else {}
    required, optional = direct(about)
    graph = closure([*required, *optional])
    always = reachable(graph, required)
    parts = [component(each, "required" if each in always else "optional") for each in sorted(graph)]
    references = {normalized(each["name"]): each["bom-ref"] for each in parts}
    dependencies = [{"ref": made["bom-ref"], "dependsOn": refs(references, {*required, *optional})}]
    dependencies += [{"ref": references[each], "dependsOn": refs(references, graph[each])} for each in sorted(graph)]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(SPACE, f'{wheel.name} {checksum}')}",
        "version": 1,
        "metadata": {
            "timestamp": datetime(*newest, tzinfo=UTC).isoformat().replace("+00:00", "Z"),  # that of its newest file
            "component": made,
        },
        "components": parts,
        "dependencies": dependencies,
    }


def direct(about: Message) -> tuple[list[str], list[str]]:
    """Return the packages that a wheel requires always, and those of its extras."""
    from packaging.requirements import Requirement

    own, required, optional = normalized(about["Name"]), [], []
    requirements = [Requirement(text) for text in about.get_all("Requires-Dist") or ()]
    for extra in ("", *(extra for extra in about.get_all("Provides-Extra") or () if extra not in NOT_USED)):
        for each in requirements:
            name = normalized(each.name)
            if name == own or (each.marker is not None and not each.marker.evaluate({"extra": extra})):
                continue
            if name not in required and name not in optional:
                (optional if extra else required).append(name)
    return required, optional


def closure(names: Iterable[str]) -> dict[str, set[str]]:
    """Return these packages and all that they need, each with what it needs itself; that is known of installed ones."""
    graph: dict[str, set[str]] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in graph:
            try:
                graph[name] = set(needs(name)) - {name}
            except metadata.PackageNotFoundError:
                graph[name] = set()
            waiting += graph[name]
    return graph


def reachable(graph: dict[str, set[str]], names: Iterable[str]) -> set[str]:
    """Return the packages that can be reached from `names`."""
    found, waiting = set(), list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found


def component(name: str, scope: str) -> Tree:
    """Return the component of a package, with its pinned version if it has one."""
    pin = pins(CONSTRAINTS.read_text()).get(name, "")
    version = pin.partition("==")[2].partition(";")[0].strip()
    try:
        about = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        about = None
    return package(about["Name"] if about else name, version, about) | {"type": "library", "scope": scope}


def package(name: str, version: str, about: Message | None) -> Tree:
    """Return the fields that all packages have."""
    purl = f"pkg:pypi/{normalized(name)}" + (f"@{version}" if version else "")
    made: Tree = {"bom-ref": purl, "name": name, "purl": purl} | ({"version": version} if version else {})
    if about is not None:
        made["licenses"] = [license_choice(license_of(about))]
    return made


def license_choice(found: str) -> Tree:
    """Return a license as an expression of SPDX if it is one, and otherwise by its name."""
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    try:
        return {"expression": canonicalize_license_expression(found)}
    except InvalidLicenseExpression:
        return {"license": {"name": found}}


def library(path: str, checksum: str) -> Tree:
    """Return the component of a compiled library in the wheel."""
    return {"type": "file", "bom-ref": f"file:{path}", "name": path, "hashes": [sha256(checksum)]}


def sha256(found: str) -> Tree:
    """Return a checksum."""
    return {"alg": "SHA-256", "content": found}


def refs(references: dict[str, str], names: Iterable[str]) -> list[str]:
    """Return the references of packages in order."""
    return sorted(references[name] for name in names)


def main() -> None:
    """Write a file for each wheel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    for wheel in parser.parse_args().wheels:
        target = wheel.with_name(f"{wheel.name}.cdx.json")
        target.write_text(json.dumps(bill(wheel), indent=2) + "\n")
        print(target)


if __name__ == "__main__":
    main()
