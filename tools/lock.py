"""Write requirements.lock: the packages that constraints.txt pins, with the SHA-256 of each file that pip may install.

    python tools/lock.py            # after changing constraints.txt; asks the package index for the hashes
    pip install --no-deps --require-hashes -r requirements.lock

torch is pinned but not locked: which of its builds is right (CPU, CUDA, ROCm) depends on the machine, and each index
has other files of the same version.
"""

import argparse
import html
import json
import os
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS, LOCK = ROOT / "constraints.txt", ROOT / "requirements.lock"
NOT_LOCKED = ("torch",)
LEAST_PYTHON = 11  # 3.11
PLATFORM = re.compile(
    r"(?:any|(?:many|musl)linux.*_(?:x86_64|aarch64)|macosx.*_(?:x86_64|arm64|universal2)|win_amd64)$"
)


def default_index() -> str:
    """Return the address of the index that pip uses if none is configured."""
    from pip._internal.models.index import PyPI

    return str(PyPI.simple_url)


def pins(text: str) -> dict[str, str]:
    """Return the requirement of each line of constraints, by normalized name."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return {normalized(re.split(r"[=<>!~; ]", line)[0]): line for line in lines if line}


def normalized(name: str) -> str:
    """Return the name of a package as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def files(index: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield name and SHA-256 of the files of a package, from an index in JSON or HTML."""
    accepted = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
    request = urllib.request.Request(f"{index.rstrip('/')}/{name}/", headers={"Accept": accepted})
    with urllib.request.urlopen(request, timeout=60) as response:
        content = response.read().decode()
        if "json" in response.headers.get("Content-Type", ""):
            for each in json.loads(content)["files"]:
                yield each["filename"], each["hashes"]["sha256"]
            return
    for link in re.findall(r'href="([^"]+)"', content):
        place, _, fragment = html.unescape(link).partition("#")
        if fragment.startswith("sha256="):
            yield place.rpartition("/")[2], fragment.removeprefix("sha256=")


def chosen(found: dict[str, str], version: str) -> list[str]:
    """Return the hashes of the wheels of a version that fit, or of its source archive if there are none."""
    wheels = [name for name in found if name.endswith(".whl") and name.split("-")[1] == version]
    archives = [name for name in found if re.search(rf"-{re.escape(version)}\.(?:tar\.gz|zip)$", name)]
    return sorted({found[name] for name in list(filter(fits, wheels)) or archives})


def fits(wheel: str) -> bool:
    """Return whether a wheel is for CPython 3.11 or newer on a system with 64 bits."""
    python, abi, platforms = wheel.removesuffix(".whl").split("-")[-3:]
    versions = [int(minor) for minor in re.findall(r"\bcp3(\d+)\b", python)]
    exact = any(minor >= LEAST_PYTHON and abi == f"cp3{minor}" for minor in versions)
    stable = abi == "abi3" and bool(versions)
    pure = abi == "none" and bool(re.search(r"\bpy3", python))
    return (exact or stable or pure) and any(map(PLATFORM.match, platforms.split(".")))


def locked(index: str, requirement: str) -> str:
    """Return the entry of a requirement with its hashes."""
    pinned, _, marker = requirement.partition(";")
    name, version = (part.strip() for part in pinned.split("=="))
    hashes = chosen(dict(files(index, normalized(name))), version)
    if not hashes:
        raise SystemExit(f"{requirement}: {index} has no file of this version; correct {CONSTRAINTS.name}")
    condition = f" ; {marker.strip()}" if marker else ""
    return " \\\n".join([f"{name}=={version}{condition}", *(f"    --hash=sha256:{each}" for each in hashes)])


def main() -> None:
    """Write the lock file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", default=os.environ.get("PIP_INDEX_URL") or default_index(), help="of packages")
    index = parser.parse_args().index
    wanted = [line for name, line in pins(CONSTRAINTS.read_text()).items() if name not in NOT_LOCKED]
    with ThreadPoolExecutor(8) as pool:
        entries = list(pool.map(lambda line: locked(index, line), wanted))
    heading = "# Made from constraints.txt by `python tools/lock.py`; do not edit.\n"
    LOCK.write_text(heading + "\n".join(entries) + "\n")
    print(f"{LOCK.name}: {len(entries)} packages")


if __name__ == "__main__":
    main()
