import pytest
import torch

from ghostnoise.bench import layers, limit
from ghostnoise.bench.contenders import compiled, contenders
from ghostnoise.bench.rows import Row, rows
from ghostnoise.bench.settings import Settings
from ghostnoise.bench.timing import Timing
from ghostnoise.lab.errors import UserError

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
    found = contenders(row, CPU)
    ours = [contender.name for contender in found if contender.kind != "peer"]
    assert ours[0] == methods[0]
    assert set(methods) <= set(ours)  # and those of methods that are not in the paper
    assert found[-1].name == f"naive GNI-{row.ghost_size}"
    x, dy = row.draw(CPU)
    for contender in found:
        assert contender.step(x, dy)()[0].shape == x.shape
    assert x.grad is None


def test_compiled_contenders_are_torchs_and_ours():
    found = contenders(Row((64, 2, 4)), CPU)
    assert [contender.name for contender in compiled(found)] == [
        "nn.LayerNorm compiled", "GNI-12 compiled", "AGNI-12 compiled", "DSU compiled", "MixStyle compiled",
    ]  # fmt: skip


@pytest.mark.parametrize("row", [Row((64, 4, 3, 2)), Row((64, 4))])
def test_the_general_level_computes_what_the_layers_do(row):
    by_name = {contender.name: contender for contender in contenders(row, CPU)}
    general = [each for each in by_name.values() if each.kind == "flex"]
    assert [each.name for each in general] == ["flex BN", "flex GBN-32", "flex XBN-32", "flex BN+GNI-32"]
    x, dy = row.draw(CPU)
    for contender in general:
        results = []
        for each in (contender, by_name[contender.name.removeprefix("flex ")]):
            torch.manual_seed(0)
            results.append([each.layer(x)])
            torch.manual_seed(0)
            results[-1] += each.step(x, dy)()
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_contenders_are_selected_by_name():
    settings = Settings("layers", CPU, only=("64x8x4x4",), contenders=("flex BN", "GBN-32"))
    (row,), _ = layers.plan(settings)
    names = [each.name for each in contenders(row, CPU, only=settings.contenders)]
    assert names == ["nn.BatchNorm2d", "GBN-32", "flex BN"]
    with pytest.raises(UserError, match=r"--contender GBN: must be one of nn\.BatchNorm2d, BN, GBN-32"):
        layers.plan(Settings("layers", CPU, contenders=("BN", "GBN")))


@pytest.mark.parametrize(("reason", "lines"), [(None, 0), ("not built", 1)])
def test_it_is_reported_that_the_operators_run_in_plain_pytorch(monkeypatch, reason, lines):
    monkeypatch.setattr("ghostnoise.engine.ops.MISSING", {"cpu": reason})
    left_out = [line for line in layers.plan(Settings("layers", CPU))[1] if "plain PyTorch" in line]
    assert left_out == ["the operators run in plain PyTorch: not built"][:lines]


def test_a_compiled_layer_has_ratios_to_the_layer_itself_and_to_what_compiling_adds_to_torchs(monkeypatch):
    times = {"nn.BatchNorm1d": 2.0, "BN": 3.0, "nn.BatchNorm1d compiled": 6.0, "BN compiled": 9.0}

    def interleave(steps, *given, **options):
        return {name: Timing(*4 * [times.get(name, 1.0)], 1) for name in steps}

    monkeypatch.setattr(layers, "interleave", interleave)
    settings = Settings("layers", CPU, compiled=True, contenders=("BN",))
    records = {each["contender"]: each for each in layers.measure(Row((64, 4)), settings, lambda share: None)}
    assert [records["BN compiled"][key] for key in ("over_eager", "added_ratio")] == [3.0, 1.5]
    assert [records["nn.BatchNorm1d compiled"][key] for key in ("over_eager", "added_ratio")] == [3.0, 1.0]
    assert "over_eager" not in records["BN"]


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
