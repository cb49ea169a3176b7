"""The exception for errors that the user can correct, and descriptions of imports that failed."""

import re


class UserError(Exception):
    """An error with a one-line message: what was given, the rule, and the remedy. Commands exit with code 2."""


def import_failure(error: BaseException, remedy: str) -> str:
    """Return the reason for a failed import, in parentheses, and a remedy: another one if torchvision is the problem.

    timm and others import torchvision, whose compiled operators must fit torch. Otherwise it raises, for example,
    "operator torchvision::nms does not exist".
    """
    from importlib.metadata import PackageNotFoundError, version

    line = (str(error).splitlines() or [""])[0]
    if re.search(r"torchvision(::|[/\\._])", line) and not isinstance(error, ModuleNotFoundError):
        try:
            mismatch = f"torchvision {version('torchvision')} does not fit torch {version('torch')}"
        except PackageNotFoundError:
            return f"({line}); {remedy}"
        return f"({mismatch}: {line}); install releases that belong together: pip install -U torch torchvision"
    return f"({line}); {remedy}"
