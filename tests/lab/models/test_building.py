"""Networks from their settings: shapes, gradients, copies and errors."""

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ghostnoise.lab import models
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.schema import ModelSettings
from ghostnoise.lab.errors import UserError
from support.lab_networks import CASES, SHAPES, SIGNALS, batch, build, images, norm, trained

FIRST = {name: ("activation", network.placements[0]) for name, network in models.CATALOG.items()}
# The first method of each network, and its ghost noise at the first place and before activations.
SOME = [case for case in CASES if case[1] in ("none", "bn") or (case[1] == "gni" and case[2] in FIRST[case[0]])]


@settings(max_examples=15)
@given(
    channels=st.integers(1, 4), rows=st.integers(1, 5), columns=st.integers(1, 5), classes=st.integers(1, 12),
    step=st.sampled_from([1, 4]), batch_size=st.integers(1, 3),
)  # fmt: skip
def test_output_has_a_column_for_each_class(channels, rows, columns, classes, step, batch_size):
    for name in models.names():
        patch = {"simple-vit": 4, "convmixer": 2, "vit1d": 4, "convmixer1d": 2}.get(name, 1)
        shape = (channels, max(patch, step) * rows, max(patch, step) * columns)
        shape = shape[:2] if name in SIGNALS else shape
        model = build(name, shape=shape, classes=classes).eval()
        assert model(images(batch_size, shape)).shape == (batch_size, classes)


def test_weights_come_from_the_default_generator():
    for name in models.names():
        first, again, other = (build(name, seed=seed).state_dict() for seed in (0, 0, 1))
        assert all(torch.equal(tensor, again[key]) for key, tensor in first.items()), name
        assert not all(torch.equal(tensor, other[key]) for key, tensor in first.items()), name


def test_networks_are_float32_on_the_cpu_and_in_training():
    for name in models.names():
        model = build(name)
        assert {(tensor.dtype, tensor.device.type) for tensor in model.parameters()} == {(torch.float32, "cpu")}
        assert model.training


@pytest.mark.parametrize(("name", "method", "place"), SOME)
def test_copies_and_files(name, method, place):
    model = trained(build(name, method, place))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        outputs = []
        for each in (model, twin):
            torch.manual_seed(5)
            outputs.append(copy.deepcopy(each)(batch(name)))
        assert torch.equal(*outputs)


@pytest.mark.parametrize(("name", "method", "place"), SOME)
def test_memory_format_does_not_matter(name, method, place):
    model = trained(build(name, method, place)).double()
    x = batch(name).double()
    outputs = []
    for form in (torch.contiguous_format, torch.channels_last):
        each = copy.deepcopy(model).to(memory_format=form)
        torch.manual_seed(5)
        y = each(x.to(memory_format=form) if x.ndim == 4 else x)  # signals have one format
        y.square().sum().backward()
        outputs.append([y, *(parameter.grad for parameter in each.parameters())])
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", models.names())
def test_networks_learn(name):
    """A few steps on a few images reduce the loss."""
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, labels = batch(name), torch.arange(8) % 5
    losses = []
    for _ in range(25):
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_default_placements():
    assert [models.placement(name, "gni") for name in models.names()] == [
        "inside", "inside", "inside", "inside", "inside", "inside", "inside", "activation", "after", "inside", "inside",
        "inside", "inside", "inside", "activation", "after", "inside",
    ]  # fmt: skip
    assert models.placement("resnet18", "dropout") == models.placement("conv1d", "dropout") == "branch"
    assert models.placement("resnet18", "eagn") == models.placement("wsln-resnet18", "agni") == "inside"
    assert models.placement("simple-vit", "eagn") == "after"
    assert models.placement("resnet18", "bn") is models.placement("simple-vit", "none") is None


def refused(model, norm, shape=(3, 8, 8), classes=10):
    with pytest.raises(UserError) as caught:
        models.build(ModelSettings(**model), norm, shape, classes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given_name", "near"),
    [("resnet81", "resnet8"), ("NF-ResNet26", "nf-resnet26"), ("simplevit", "simple-vit"), ("conv-1d", "conv1d")],
)
def test_an_unknown_network_suggests_the_nearest(given_name, near):
    said = refused({"name": given_name}, norm("bn"))
    assert f"model.name={given_name!r}: must be one of 'resnet18', " in said
    assert f"did you mean {near!r}?" in said
    with pytest.raises(UserError, match=f"did you mean '{near}'"):
        models.placement(given_name, "gni")


@pytest.mark.parametrize(
    ("name", "method", "said"),
    [
        ("resnet18", "none", "'resnet18', which is batch-normalized: must be one of 'bn', 'gbn', 'xbn', 'en'"),
        ("simple-vit", "bn", "'simple-vit', which has no batch norm: must be one of 'none', 'gni', 'agni', "),
        ("wsln-resnet18", "gbn", "has no batch norm: must be one of 'none', 'gni', 'agni', 'dropout', "),
        ("wsln-conv1d", "bn", "has no batch norm: must be one of 'none', 'gni', 'agni', 'dropout', "),
        ("conv1d", "none", "'conv1d', which is batch-normalized: must be one of 'bn', 'gbn', 'xbn', 'en'"),
        ("vit1d", "gbn", "'vit1d', which has no batch norm: must be one of 'none', 'gni', 'agni', "),
        (
            "nf-resnet26",
            "eagn",
            "has no placement for it, unlike 'resnet18', 'resnet20', 'resnet8', 'resnet50', 'wsln-resnet18'",
        ),
        (
            "mlp",
            "dropout",
            "has no placement for it, unlike 'resnet18', 'resnet20', 'resnet8', 'resnet50', 'wsln-resnet18', "
            "'preact-resnet18', 'preact-wsln-resnet18', 'digits-net', 'conv1d', 'wsln-conv1d'",
        ),
    ],
)
def test_methods_that_a_network_does_not_have(name, method, said):
    assert said in refused({"name": name}, norm(method), SHAPES[name])
    with pytest.raises(UserError):
        models.placement(name, method)


@pytest.mark.parametrize(
    ("name", "method", "place", "said"),
    [
        ("resnet18", "gni", "branch", "must be one of 'inside', 'after', 'activation'; the default is 'inside'"),
        ("resnet18", "dropout", "inside", "must be one of 'branch'; the default is 'branch'"),
        ("resnet18", "eagn", "activation", "must be one of 'inside', 'after'; the default is 'inside'"),
        ("nf-resnet26", "gni", "after", "must be one of 'activation'; the default is 'activation'"),
        ("nf-resnet1d", "gni", "inside", "must be one of 'activation'; the default is 'activation'"),
        ("conv1d", "dropout", "after", "must be one of 'branch'; the default is 'branch'"),
    ],
)
def test_placements_that_a_network_does_not_have(name, method, place, said):
    expected = f"norm.placement={place!r} for {method!r} in {name!r}: {said}"
    assert refused({"name": name}, norm(method, placement=place), SHAPES[name]) == expected


def test_widths_are_for_mlps_only_and_exclude_width():
    said = "model.widths=[4, 8] for 'resnet18': it takes one width; give model.width"
    assert refused({"name": "resnet18", "widths": [4, 8]}, norm("bn")) == said
    said = "model.width=4 and model.widths=[4, 8]: give only one of them"
    assert refused({"name": "mlp", "width": 4, "widths": [4, 8]}, norm("bn")) == said


@pytest.mark.parametrize("name", ["preact-resnet18", "mlp", "nf-resnet26", "timm:resnet18"])
def test_only_networks_that_have_a_last_norm_can_start_with_its_gain_at_zero(name):
    method = "bn" if name != "nf-resnet26" else "none"
    assert refused({"name": name, "zero_init_last": True}, norm(method), (3, 32, 32)) == (
        f"model.zero_init_last for {name!r}: only for networks with a norm at the end of each residual branch, such as "
        "'resnet18' and 'resnet50'; leave it out"
    )


@pytest.mark.parametrize("shape", [(), (3,), (3, 0), (0, 8), (0, 8, 8), (3, 8, -8), (3, 8, 8, 8)])
def test_invalid_shapes(shape):
    rule = "must be (channels, height, width) or (channels, length) and a count, 1 or more"
    assert refused({"name": "mlp"}, norm("bn"), shape) == f"shape={shape}, classes=10: {rule}"
    assert refused({"name": "mlp"}, norm("bn"), classes=0) == f"shape=(3, 8, 8), classes=0: {rule}"


IMAGES_ONLY = [name for name in models.names() if name not in SIGNALS and name != "mlp"]


@pytest.mark.parametrize("name", [*IMAGES_ONLY, *SIGNALS])
def test_networks_for_images_refuse_signals_and_the_reverse(name):
    signals = name in SIGNALS
    shape, fitting = ((3, 8, 8), IMAGES_ONLY) if signals else ((3, 16), SIGNALS)
    takes = "signals (channels, length)" if signals else "images (channels, height, width)"
    said = refused({"name": name}, norm(models.CATALOG[name].methods[0]), shape)
    assert said.startswith(
        f"model.name={name!r} with samples of shape {shape}: it takes {takes}; use another data set, or one of "
    )
    listed = said.rpartition("one of ")[2].replace("'", "").split(", ")
    assert sorted(listed) == sorted([*fitting, "mlp"])


def test_an_mlp_takes_images_and_signals():
    for shape in ((3, 4, 5), (3, 20), (60, 1)):
        model = build("mlp", shape=shape)
        assert model[1].in_features == 60
        assert model(images(4, shape)).shape == (4, 5)


def test_settings_of_batch_norms_in_networks_without_them():
    for more in ({"eps": 1e-3}, {"momentum": 0.2}):
        said = refused({"name": "simple-vit"}, norm("none", **more))
        assert "settings of batch norms, which it does not have; leave them out" in said


def test_errors_of_layers_are_user_errors():
    said = refused({"name": "resnet8"}, NormSettings(method="xbn", ghost_size=1))
    assert said.startswith("ghost_size=1: must be an integer from 2 to 65536")
