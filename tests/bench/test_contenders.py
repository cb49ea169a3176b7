import pytest
import torch
from ghostnoise.engine.backends import select as backends
from ghostnoise.engine.backends.aten import ATEN

from ghostnoise.bench import limit
from ghostnoise.bench.contenders import compiled, contenders, usable_backends
from ghostnoise.bench.rows import Row, rows
from ghostnoise.bench.settings import Settings

CPU = torch.device("cpu")


def test_the_rows_are_the_promised_ones():
    names = [row.name for row in rows(Settings("layers", CPU))]
    images = ["256x64x32x32", "256x128x16x16", "256x256x8x8", "256x512x4x4"]
    assert names == [
        *(f"{size} {form}" for form in ("contiguous", "channels_last") for size in images), "1024x1024", "256x512",
        "256x64x512", "64x8x4x4 contiguous",
    ]  # fmt: skip


def test_rows_are_selected_by_name_and_format():
    assert [row.name for row in rows(Settings("layers", CPU, only=("1024", "512x4")))] == [
        "256x512x4x4 contiguous", "256x512x4x4 channels_last", "1024x1024",
    ]  # fmt: skip
    assert "channels_last" not in str([row.name for row in rows(Settings("layers", CPU, formats=("contiguous",)))])


def test_inputs_are_the_same_numbers_in_both_formats():
    (x, dy), (x_last, dy_last) = (Row((8, 4, 2, 2), form).draw(CPU) for form in ("contiguous", "channels_last"))
    assert torch.equal(x, x_last)
    assert torch.equal(dy, dy_last)
    for tensor in (x_last, dy_last):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert not tensor.is_contiguous()


@pytest.mark.parametrize(
    ("row", "methods"),
    [
        (Row((64, 4, 2, 2)), ["nn.BatchNorm2d", "BN", "GBN-32", "XBN-32", "BN+GNI-32", "BN+AGNI-32", "GNI-32"]),
        (Row((64, 4)), ["nn.BatchNorm1d", "BN", "GBN-32", "XBN-32", "BN+GNI-32", "BN+AGNI-32", "GNI-32"]),
        (Row((64, 2, 4)), ["nn.LayerNorm", "GNI-12", "AGNI-12"]),
    ],
)
def test_every_method_is_there_and_gives_gradients_of_x(row, methods):
    found = contenders(row, ["aten"], CPU)
    ours = [contender.method for contender in found if contender.kind != "peer"]
    assert ours[0] == methods[0]
    assert set(methods) <= set(ours)  # and those of methods that are not in the paper
    assert found[-1].method == f"naive GNI-{row.ghost_size}"
    x, dy = row.draw(CPU)
    for contender in found:
        assert contender.step(x, dy)()[0].shape == x.shape
    assert x.grad is None


def test_compiled_contenders_are_torchs_and_ours_once():
    found = contenders(Row((64, 2, 4)), ["aten", "native"], CPU)
    assert [contender.name for contender in compiled(found)] == [
        "nn.LayerNorm compiled", "GNI-12 compiled", "AGNI-12 compiled",
    ]  # fmt: skip


def test_a_contender_runs_on_its_backend():
    row, chosen = Row((64, 2, 4)), []
    (contender,) = [found for found in contenders(row, ["aten"], CPU) if found.method == "GNI-12"]
    with contender.running():
        assert backends.chosen() == "aten"
    contender.layer.register_forward_hook(lambda *given: chosen.append(backends.chosen()))
    step = contender.step(*row.draw(CPU))
    for _ in range(2):
        assert backends.chosen() == "auto"
        step()
    assert chosen == ["aten", "aten"]


def test_unusable_backends_are_named(monkeypatch):
    monkeypatch.setattr("ghostnoise.doctor.reason", lambda name: None if name == "aten" else "not built")
    assert usable_backends(CPU) == (
        ["aten"],
        ["backend native is left out: not built", "backend triton is left out: not built"],
    )


def test_triton_is_not_timed_in_its_interpreter(monkeypatch):
    monkeypatch.setattr("ghostnoise.doctor.reason", lambda name: None)
    monkeypatch.setattr(backends, "load", lambda name: ATEN)
    usable, reasons = usable_backends(CPU)
    assert usable == ["aten", "native"]
    assert "interpreter" in reasons[0]


@pytest.mark.parametrize(("noise", "reads", "writes"), [(False, 6, 2), (True, 3, 2)])
def test_the_limit_moves_as_many_tensors_as_a_layer(noise, reads, writes):
    """2 + 4 reads and 1 + 1 writes for a normalizer; 2 + 1 and 1 + 1 for noise; nothing of x's size is allocated."""
    from torch.utils._python_dispatch import TorchDispatchMode

    moved = {"reads": 0, "writes": 0}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            moved["reads"] += sum(isinstance(arg, torch.Tensor) and arg.numel() == 24 for arg in args)
            moved["writes"] += kwargs["out"].numel() == 24
            return function(*args, **kwargs)

    step = limit.streams(torch.ones(2, 3, 4), noise)
    with Count():
        step()
    assert moved == {"reads": reads, "writes": writes}
