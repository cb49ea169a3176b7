"""Write docs/licenses.md: every package that constraints.txt pins, with its version and the license that it declares.

python tools/licenses.py        # in the environment of `make test`, after changing constraints.txt
"""

import re
import sys
from collections.abc import Iterator
from email.message import Message
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lock import CONSTRAINTS, ROOT, normalized, pins

TARGET = ROOT / "docs" / "licenses.md"
HEADING = """\
# Licenses of dependencies

ghostnoise has the license Apache-2.0. It contains none of these packages: pip installs them. The table has every
package that `constraints.txt` pins, the license that the package itself declares, and what needs it: ghostnoise, or one
of its extras. All others are only needed to develop ghostnoise. `python tools/licenses.py` writes this page, and a test
compares it with the installed packages.

| package | version | license | needed by |
| --- | --- | --- | --- |
"""
USED = ("lab", "imagenet", "tensorboard", "wandb", "ray")
# Names of licenses, where a package has no expression of SPDX.
SPDX = {
    "MIT License": "MIT", "MIT": "MIT", "BSD License": "BSD",  # of which there are several
    "BSD 3-Clause": "BSD-3-Clause", "3-Clause BSD License": "BSD-3-Clause", "Apache Software License": "Apache-2.0",
    "Apache 2.0": "Apache-2.0", "Apache License 2.0": "Apache-2.0", "Apache 2.0 License": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0", "Apache": "Apache-2.0", "Apache License": "Apache-2.0",
    "Python Software Foundation License": "PSF-2.0", "PSF": "PSF-2.0", "PSFL": "PSF-2.0", "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0", "The Unlicense (Unlicense)": "Unlicense",
}  # fmt: skip
# Packages whose metadata has no license, and the license in their LICENSE file.
IN_A_FILE = {"pytorch-tabnet": "MIT"}


def license_of(package: Message) -> str:
    """Return the license in the metadata of a package, as an expression of SPDX if that is known."""
    if expression := package.get("License-Expression"):
        return str(expression)
    declared = str(package.get("License") or "").strip()
    classified = [
        each.rpartition(" :: ")[2] for each in package.get_all("Classifier") or () if each.startswith("License :: ")
    ]
    if declared and "\n" not in declared and len(declared) < 60 and declared.lower() not in ("unknown", "dual license"):
        return SPDX.get(declared, declared)
    names = [SPDX.get(name, name) for name in classified if name != "OSI Approved"]
    if names:
        return " OR ".join(dict.fromkeys(names)) if len(names) > 1 else names[0]
    if not declared:
        return IN_A_FILE.get(str(package.get("Name")), "not declared")
    return SPDX.get(declared.splitlines()[0].strip(), declared.splitlines()[0].strip())


def needs(name: str, extra: str = "") -> Iterator[str]:
    """Yield the names of packages that a package requires here, with an extra or without."""
    from packaging.requirements import Requirement

    for text in metadata.requires(name) or ():
        each = Requirement(text)
        if each.marker is None or each.marker.evaluate({"extra": extra}):
            yield normalized(each.name)
            for further in each.extras:
                yield from needs(each.name, further)


def closure(extra: str = "") -> set[str]:
    """Return the names of all packages that ghostnoise needs with an extra."""
    found: set[str] = set()
    waiting = list(needs("ghostnoise", extra))
    while waiting:
        name = waiting.pop()
        if name not in found and name != "ghostnoise":
            found.add(name)
            try:
                waiting += needs(name)
            except metadata.PackageNotFoundError:
                continue
    return found


def page() -> str:
    """Return the contents of the page."""
    needed = {"ghostnoise": closure()} | {f"[{extra}]": closure(extra) for extra in USED}
    rows = []
    for name in sorted(pins(CONSTRAINTS.read_text())):
        package = metadata.metadata(name)
        users = [user for user, names in needed.items() if name in names]
        users = ["ghostnoise"] if "ghostnoise" in users else ["[lab]"] if "[lab]" in users else users
        cells = (package["Name"], package["Version"].partition("+")[0], license_of(package), ", ".join(users))
        rows.append("| " + " | ".join(re.sub(r"[|\s]+", " ", cell) for cell in cells) + " |")
    return HEADING + "\n".join(rows) + "\n"


if __name__ == "__main__":
    TARGET.write_text(page())
    print(TARGET)
