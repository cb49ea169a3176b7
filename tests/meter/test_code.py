"""Code that `advise` prints, executed as it is printed."""

import importlib

import pytest
import torch
from torch import nn

import ghostnoise
from ghostnoise.meter import Reading, advise
from ghostnoise.meter.code import Placement, convert_calls
from ghostnoise.methods import registry
from support.metering import measure_model


def images(size=32, batch=8, seed=0):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def timm(name, **options):
    torch.manual_seed(0)
    importlib.import_module("startup.sitecustomize")  # timm imports torchvision
    return importlib.import_module("timm").create_model(name, num_classes=5, **options)


def noise_layers(model):
    """Names of the layers that have ghost noise: of the converted norms, and of the hosts of inserted noise."""
    return {
        name.removesuffix(".ghost_noise")
        for name, module in model.named_modules()
        if isinstance(module, (ghostnoise.GhostNoise, *registry.find("gni")[0].norms))
    }


def run_printed(model, text, ghost_size):
    """Execute the lines of code in the printed advice, one by one, and return them."""
    lines = [
        line for line in text.splitlines() if line.startswith(("import ", "from ", "ghostnoise.convert", "model."))
    ]
    known = {"model": model}
    for line in lines:
        exec(line, known)
    return lines


def checked(model, batch, lines, ghost_size=4, **options):
    """Check the code for a model: it gives exactly the measured layers noise, and the model then trains."""
    reading = measure_model(model, [batch], ghost_size, gap=False, draws=8, **options)
    advice = advise(reading)
    assert run_printed(model, str(advice), advice.ghost_size) == list(advice.code) == lines(advice.ghost_size)
    expected = {layer.placement.name for layer in reading.layers}
    assert noise_layers(model) == expected
    model.train()(batch).sum().backward()
    return reading


def test_resnet():
    checked(timm("test_resnet"), images(), lambda size: [
        "import ghostnoise", f'ghostnoise.convert(model, "gni", ghost_size={size})',
    ])  # fmt: skip


def test_vit():
    """The LayerNorm of timm is a subclass whose channel dimension `convert` knows."""
    model = timm("test_vit", img_size=32)
    checked(model, images(), lambda size: [
        "import ghostnoise", "from torch import nn",
        f'ghostnoise.convert(model, "gni", ghost_size={size}, after=nn.LayerNorm)',
    ])  # fmt: skip


def test_convnext():
    """Norms of images have their channels in dimension 1, norms of blocks in the last one."""
    model = timm("test_convnext")
    checked(model, images(64), lambda size: [
        "import ghostnoise", "from timm.layers import LayerNorm2d",  "from timm.layers import LayerNorm",
        f'ghostnoise.convert(model, "gni", ghost_size={size}, after=LayerNorm2d)',
        f'ghostnoise.convert(model, "gni", ghost_size={size}, after=LayerNorm)',
    ])  # fmt: skip


def mlp(norm=nn.BatchNorm1d):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), norm(8), nn.ReLU(), nn.Linear(8, 8), norm(8), nn.ReLU())


def rows(seed=0):
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("norm", "modules", "arguments", "imports"),
    [
        (nn.BatchNorm1d, None, "", []),
        (nn.BatchNorm1d, "1", ", where=lambda name, module: name == '1'", []),
        (nn.LayerNorm, None, ", after=nn.LayerNorm", ["from torch import nn"]),
        (nn.Identity, ["2", "5"], ", after=nn.ReLU, channel_dim=-1", ["from torch import nn"]),
        (nn.Identity, ["0", "3"], ", after=nn.Linear", ["from torch import nn"]),
        (
            nn.LayerNorm,
            ["1", "2"],
            ", after=nn.Module, where=lambda name, module: name in ('1', '2'), channel_dim=-1",
            ["from torch import nn"],
        ),
    ],
)
def test_mlp(norm, modules, arguments, imports):
    checked(mlp(norm), rows(), lambda size: [
        "import ghostnoise", *imports, f'ghostnoise.convert(model, "gni", ghost_size={size}{arguments})',
    ], modules=modules, channel_dim=1)  # fmt: skip


def test_the_input_of_a_module():
    checked(mlp(), rows(), lambda size: [
        "import ghostnoise", "from torch import nn",
        f'ghostnoise.convert(model, "gni", ghost_size={size}, before=nn.ReLU, channel_dim=-1)',
    ], modules=["2", "5"], side="input")  # fmt: skip


def test_batch_norms_and_layer_norms_in_one_network():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Linear(8, 2))
    checked(model, rows(), lambda size: [
        "import ghostnoise", "from torch import nn", f'ghostnoise.convert(model, "gni", ghost_size={size})',
        f'ghostnoise.convert(model, "gni", ghost_size={size}, after=nn.LayerNorm)',
    ])  # fmt: skip


def test_a_type_that_cannot_be_imported_is_selected_by_name():
    class Norm(nn.Module):
        def forward(self, x):
            return x - x.mean()

    model = nn.Sequential(nn.Linear(6, 8), Norm(), nn.ReLU(), Norm())
    checked(model, rows(), lambda size: [
        "import ghostnoise", "from torch import nn",
        f'ghostnoise.convert(model, "gni", ghost_size={size}, after=nn.Module, '
        "where=lambda name, module: name in ('1', '3'), channel_dim=-1)",
    ], channel_dim=1)  # fmt: skip


def test_the_size_of_noise_that_the_model_already_has_is_changed():
    model = mlp(nn.LayerNorm)
    ghostnoise.convert(model, "gni", ghost_size=2, after=nn.LayerNorm)
    model.append(ghostnoise.GhostNoise(3))
    advice = advise(measure_model(model, [rows()], 8, gap=False))
    size = advice.ghost_size
    assert run_printed(model, str(advice), size) == [
        "import ghostnoise", "from torch import nn",
        f'ghostnoise.convert(model, "gni", ghost_size={size}, after=nn.LayerNorm)',
        f"model.get_submodule('6').ghost_size = {size}",
    ]  # fmt: skip
    sizes = {module.ghost_size for module in model.modules() if isinstance(module, ghostnoise.GhostNoise)}
    assert sizes == {size}
    model.train()(rows())


class Pair(nn.Module):
    def forward(self, x):
        return x, x


def test_places_without_possible_noise_are_named_and_have_no_code():
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), Pair())
    with ghostnoise.Meter(model, 4, modules=["0", "1"], channel_dim=1) as meter:
        model(rows())
    advice = advise(meter.result())
    assert advice.code == ()
    assert advice.impossible == ("0", "1")
    assert "ghostnoise.convert cannot insert noise at '0', '1': " in str(advice)


def test_a_stored_reading_gives_the_same_code(tmp_path):
    reading = measure_model(mlp(nn.LayerNorm), [rows()], 4, gap=False)
    reading.save(tmp_path / "noise.npz")
    assert advise(Reading.load(tmp_path / "noise.npz")).code == advise(reading).code


def test_types_of_the_same_name_are_not_both_imported():
    first, second = (
        Placement("after", name, -1, False, ((f"{package}.Norm", 0),)) for name, package in (("a", "one"), ("b", "two"))
    )
    assert convert_calls([first, second], 8) == [
        "import ghostnoise", "from one import Norm", "from torch import nn",
        'ghostnoise.convert(model, "gni", ghost_size=8, after=Norm, channel_dim=-1)',
        'ghostnoise.convert(model, "gni", ghost_size=8, after=nn.Module, where=lambda name, module: name == \'b\', '
        "channel_dim=-1)",
    ]  # fmt: skip
