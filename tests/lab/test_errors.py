"""Descriptions of imports that failed."""

import builtins
import importlib
from importlib import metadata

import pytest

from ghostnoise.lab import measure
from ghostnoise.lab.data import image_folder
from ghostnoise.lab.errors import UserError, import_failure
from ghostnoise.lab.models import foreign

NMS = RuntimeError("operator torchvision::nms does not exist\nand more")


def test_a_torchvision_that_does_not_fit_torch_is_named(monkeypatch):
    versions = {"torchvision": "0.19.1", "torch": "2.9.0"}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    expected = (
        "(torchvision 0.19.1 does not fit torch 2.9.0: operator torchvision::nms does not exist); install releases "
        "that belong together: pip install -U torch torchvision"
    )
    assert import_failure(NMS, "pip install timm") == expected
    symbol = ImportError("/site-packages/torchvision/_C.so: undefined symbol: _ZN3c10")
    assert import_failure(symbol, "").startswith("(torchvision 0.19.1 does not fit torch 2.9.0: /site-packages")


@pytest.mark.parametrize("text", ["No module named 'timm'", "No module named 'torchvision'", ""])
def test_other_failures_keep_their_reason_and_remedy(text):
    assert import_failure(ImportError(text), "pip install timm") == f"({text}); pip install timm"


def test_a_missing_torchvision_is_not_a_mismatch(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    error = ImportError("No module named 'torchvision.transforms'")
    assert import_failure(error, "install it") == "(No module named 'torchvision.transforms'); install it"


@pytest.mark.parametrize(
    "user",
    [
        lambda: foreign._timm("timm:resnet18"),
        lambda: image_folder._transforms(8, 8),
        lambda: measure.call("their_networks:make"),
    ],
    ids=["timm", "imagefolder", "module:function"],
)
def test_it_is_named_wherever_torchvision_is_imported(monkeypatch, tmp_path, user):
    monkeypatch.setattr(metadata, "version", lambda name: "1.2.3")

    def fail(*args, **options):
        raise NMS

    monkeypatch.setattr(importlib, "import_module", fail)
    monkeypatch.setattr(builtins, "__import__", _failing(__import__))
    with pytest.raises(
        UserError, match=r"torchvision \S+ does not fit torch \S+: operator .*pip install -U torch torch"
    ):
        user()


def _failing(original):
    def load(name, *args, **options):
        if name == "timm":
            raise NMS
        return original(name, *args, **options)

    return load
