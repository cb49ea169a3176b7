"""Kinds of batch norm to convert: subclasses, lazy, synchronized, parametrized, with drop and act."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import ghostnoise
from ghostnoise import GhostNoiseBatchNorm
from ghostnoise.conversion import variants
from ghostnoise.conversion.swap import Method, check_options, find, name_of
from ghostnoise.methods import registry
from ghostnoise.methods.base import NormLayer
from ghostnoise.methods.registry import MethodSpec
from support import networks
from support.families import SHAPES, example
from support.models import SIZES

every_rank = pytest.mark.parametrize("dimensions", list(SHAPES))
every_method = pytest.mark.parametrize("method", list(SIZES))


class Renamed(nn.BatchNorm2d):
    """A subclass that does not define a forward."""

    def greeting(self):
        return "hello"


class AnyRank(nn.BatchNorm2d):
    def _check_input_dim(self, input):
        pass


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def built(method, dimensions=2):
    """Return a layer of a method that is constructed."""
    spec, fixed = registry.names()[method]
    return spec.norms[dimensions - 1](3, **SIZES[method], **fixed)


def seeded(run, x):
    torch.manual_seed(0)
    return run(x)


def test_subclasses_without_a_forward_of_their_own():
    model = ghostnoise.convert(nn.Sequential(Renamed(3), AnyRank(3)), "gni", 4)
    assert [type(layer) for layer in model] == [ghostnoise.GhostNoiseBatchNorm2d, GhostNoiseBatchNorm]
    for dimensions in SHAPES:  # those that accept other ranks still do
        assert model[1](example(dimensions)).shape == SHAPES[dimensions]
    assert model[0](example(2)).shape == SHAPES[2]
    ghostnoise.revert(model)
    assert model[0].greeting() == "hello"
    assert type(model[1]) is AnyRank


def test_subclasses_of_layers_of_this_library():
    class Own(ghostnoise.GhostBatchNorm2d):
        def forward(self, x):
            return x

    with pytest.raises(ValueError, match=r"'0' \(Own\) is a .*Own, which defines its own forward"):
        ghostnoise.convert(nn.Sequential(Own(3, ghost_size=4)), "gni", 4)
    class_without = type("Without", (ghostnoise.GhostBatchNorm2d,), {})
    model = ghostnoise.convert(nn.Sequential(class_without(3, ghost_size=4)), "gni", 4)
    assert type(model[0]) is ghostnoise.GhostNoiseBatchNorm2d


# Lazy.


def lazy(dimensions, **options):
    return nn.Sequential(getattr(nn, f"LazyBatchNorm{dimensions}d")(**options))


@every_rank
@every_method
def test_lazy_layers_stay_lazy_until_the_first_batch(dimensions, method):
    model, expected = ghostnoise.convert(lazy(dimensions), method, **SIZES[method]), built(method, dimensions)
    assert isinstance(model[0], getattr(nn, f"LazyBatchNorm{dimensions}d"))
    assert model[0].has_uninitialized_params()
    twin = pickle.loads(pickle.dumps(model))  # torch refuses to deep-copy lazy modules
    for each in (model, twin):
        assert torch.equal(seeded(each, example(dimensions)), seeded(copy.deepcopy(expected), example(dimensions)))
        assert type(each[0]) is type(expected)
        assert repr(each[0]) == repr(expected)


@pytest.mark.parametrize("seen", [False, True])
def test_lazy_layers_revert_and_convert_again(seen):
    model = ghostnoise.convert(ghostnoise.convert(lazy(2), "gni", 4), "gbn", 2)
    assert "noise_eps" not in vars(model[0])
    if seen:
        model(example(2))
        assert type(model[0]) is ghostnoise.GhostBatchNorm2d
    ghostnoise.revert(model)
    assert type(model[0]) is (nn.BatchNorm2d if seen else nn.LazyBatchNorm2d)
    assert "cls_to_become" not in vars(model[0])
    ghostnoise.convert(model, "gni", 4)(example(2))
    assert type(model[0]) is ghostnoise.GhostNoiseBatchNorm2d


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"affine": False, "track_running_stats": False}])
def test_lazy_layers_load_a_state_dict(options):
    plain = nn.Sequential(nn.BatchNorm2d(3, **options))
    plain(example(2))
    model = ghostnoise.convert(lazy(2, **options), "gbn", 4)
    model.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(model.eval()(example(2)), plain.eval()(example(2)))
    assert type(model[0]) is ghostnoise.GhostBatchNorm2d
    assert model[0].num_features == 3
    if options == {}:
        with pytest.raises(ValueError, match="got 4 channels"):
            model.train()(torch.randn(8, 4, 2, 2))


# Synchronized.


@every_method
def test_synchronized_layers_accept_any_rank(method):
    group = object()
    model = nn.Sequential(nn.SyncBatchNorm(3, process_group=group))
    ghostnoise.convert(model, method, **SIZES[method], scope="local")
    assert type(model[0]) is registry.names()[method][0].norm
    assert model[0].process_group is None
    for x in (torch.randn(8, 3), *map(example, SHAPES)):
        assert model(x).shape == x.shape
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* layers become plain batch norm")
        assert type(ghostnoise.revert(model)[0]) is nn.SyncBatchNorm
    assert model[0].process_group is group
    by_hand = nn.Sequential(ghostnoise.GhostBatchNorm(3, ghost_size=4))
    assert type(ghostnoise.revert(by_hand)[0]) is nn.SyncBatchNorm


# Parametrized.


def test_parametrized_layers_keep_their_parametrizations():
    model = nn.Sequential(nn.BatchNorm2d(3))
    parametrize.register_parametrization(model[0], "weight", Doubled())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.eval()(example(2))
    ghostnoise.convert(model, "gbn", 4)
    assert isinstance(model[0], ghostnoise.GhostBatchNorm2d)
    assert torch.equal(model(example(2)), before)
    model.train()(example(2)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].parametrizations.weight.original, torch.ones(3))
    assert torch.equal(model[0].weight, 2 * model[0].parametrizations.weight.original)
    twin = copy.deepcopy(model)
    assert torch.equal(twin.eval()(example(2)), model.eval()(example(2)))
    assert ghostnoise.summary(model)[0][:3] == ("0", "GhostBatchNorm2d", "BatchNorm2d")
    assert "parametrized: weight" in ghostnoise.summary(model)[0].notes
    ghostnoise.convert(model, "gni", 4)
    assert type(model[0]).__mro__[1] is ghostnoise.GhostNoiseBatchNorm2d
    ghostnoise.revert(twin)
    assert type(twin[0]).__mro__[1] is nn.BatchNorm2d
    for each, kind in ((model, ghostnoise.GhostNoiseBatchNorm2d), (twin, nn.BatchNorm2d)):
        parametrize.remove_parametrizations(each[0], "weight")
        assert type(each[0]) is kind


# With drop and act.


@every_method
def test_drop_and_act_are_kept(method):
    theirs = networks.layer("BatchNormAct2d")
    model = nn.Sequential(theirs(3, act_layer=nn.SiLU, drop_layer=nn.Dropout2d))
    act, drop = model[0].act, model[0].drop
    model(example(2))
    expected = model.eval()(example(2))
    ghostnoise.convert(model, method, **SIZES[method])
    assert (model[0].act, model[0].drop) == (act, drop)
    assert torch.equal(model(example(2)), expected) != registry.names()[method][0].changes_inference
    model.train(), drop.eval()
    assert torch.equal(seeded(model, example(2)), act(seeded(built(method), example(2))))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert type(twin[0]) is variants.activated(registry.names()[method][0].norms[1])
        assert torch.equal(twin.eval()(example(2)), model.eval()(example(2)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* layers become plain batch norm")
        assert type(ghostnoise.revert(model)[0]) is theirs


def test_synchronized_layers_with_drop_and_act():
    convert = networks.norm_act().convert_sync_batchnorm
    model = convert(nn.Sequential(networks.layer("BatchNormAct2d")(3)))
    ghostnoise.convert(model, "gbn", 4, scope="local")
    assert (model(example(2)) >= 0).all()
    assert type(ghostnoise.revert(model)[0]).__name__ == "SyncBatchNormAct"


def test_other_layers_of_timm_with_their_own_forward():
    split = networks.layer("SplitBatchNorm2d")(4)
    with pytest.raises(ValueError, match=r"SplitBatchNorm2d, which defines its own forward, .*where="):
        ghostnoise.convert(nn.Sequential(split), "gni", 4)


def test_activated_classes_are_created_once_and_found_by_name():
    kind = variants.activated(ghostnoise.GhostBatchNorm2d)
    assert kind is variants.activated(ghostnoise.GhostBatchNorm2d) is variants.ActivatedGhostBatchNorm2d
    assert pickle.loads(pickle.dumps(kind)) is kind
    for name in ("ActivatedNothing2d", "nothing"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(variants, name)


# Methods and their options.


@pytest.mark.parametrize("name", SIZES)
def test_options_are_those_of_the_layer_that_conversion_does_not_name(name):
    method = Method(name, *registry.find(name))
    options = method.options(method.spec.norm)
    public = {name for name in method.spec.norm.options if not name.startswith("_")}
    assert {*options, *method.fixed, "ghost_size"} >= public - {"process_group"}
    assert not {"ghost_size", "bias", "num_features", "device", *method.fixed} & {*options}
    if method.spec.noise is not None:
        assert "noise_eps" in method.options(method.spec.noise)
        assert "channel_dim" not in method.options(method.spec.noise)


class Strict(ghostnoise.BatchNorm):
    def __init__(self, num_features, *, strength):
        super().__init__(num_features)


@pytest.mark.parametrize(
    ("given", "name", "size"),
    [
        ("GNI", "gni", None), ("GNI-16", "gni", 16), ("gni 16", "gni", 16), ("Ghost Noise", "gni", None),
        ("ghost noise injection", "gni", None), ("GNI_shift", "gni-shift", None), ("gni-scale-8", "gni-scale", 8),
        ("GhostNoiseBatchNorm2d", "gni", None), (ghostnoise.GhostNoiseBatchNorm2d, "gni", None),
        (ghostnoise.GhostNoise, "gni", None), ("ghost batch norm", "gbn", None), (ghostnoise.EvalNorm, "en", None),
        ("Batch Renormalization", "brn", None), ("AGNI-Conv", "agni-conv", None), ("batch_norm", "bn", None),
    ],
)  # fmt: skip
def test_methods_are_found_in_any_spelling(given, name, size):
    method, found = find(given)
    assert (method.name, found) == (name, size)
    assert method[1:] == registry.find(name)


def test_subclasses_of_users_are_not_taken_for_their_parent():
    with pytest.raises(ValueError, match=r"method=<class .*Strict'>: must be one of"):
        find(Strict)


def test_options_without_a_default_must_be_given():
    spec = MethodSpec("strict", "Strict", "", "", "", norm=Strict)
    check_options(Method("strict", spec, {}), Strict, {"strength": 1}, [])
    check_options(Method("strict", spec, {"strength": 1}), Strict, {}, [])
    with pytest.raises(ValueError, match="strength is missing: Strict has no default for it; give strength="):
        check_options(Method("strict", spec, {}), Strict, {}, [])


def test_names_of_layers_built_with_other_options():
    layer = ghostnoise.GhostNoiseBatchNorm2d(3, ghost_size=4, components="scale")
    assert name_of(type(layer), vars(layer)) == "gni-scale"
    assert name_of(ghostnoise.BatchNorm2d, {}) == "bn"
    assert name_of(ghostnoise.AnalyticalGhostNoise, {"law": "conv", "components": "shift"}) == "agni-conv"


# The summary.


def test_rows_of_converted_layers_and_of_noise():
    model = ghostnoise.convert(nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm1d(3)), "gni", {"0": 4, "*": 8})
    assert list(ghostnoise.summary(model)) == [
        ("0", "GhostNoiseBatchNorm2d", "BatchNorm2d", "gni", 4, "local", ""),
        ("1", "GhostNoiseBatchNorm1d", "BatchNorm1d", "gni", 8, "local", ""),
    ]
    model = nn.Sequential(nn.LayerNorm(6), ghostnoise.GhostNoise(3, components="shift"))
    model.append(ghostnoise.EvalNorm2d(3, ghost_size=4))
    ghostnoise.convert(model, "agni-conv", 4, before=nn.LayerNorm)
    assert list(ghostnoise.summary(model)) == [
        ("0", "AnalyticalGhostNoise", "", "agni-conv", 4, "local", "before LayerNorm"),
        ("1", "GhostNoise", "", "gni-shift", 3, "local", ""),
        ("2", "EvalNorm2d", "BatchNorm2d", "en", 4, "local", ""),
    ]


def test_notes():
    shared = nn.BatchNorm1d(3)
    shared.register_forward_hook(lambda *args: None)
    shared.register_full_backward_hook(lambda *args: None)
    model = nn.Sequential(shared, shared, nn.LazyBatchNorm1d())
    first, second = ghostnoise.summary(ghostnoise.convert(model, "gbn", ghostnoise.OffAfter(4, steps=1)))
    assert first.notes == "OffAfter; hooks: 2; also 1"
    assert second[1:3] == ("GhostBatchNorm1d", "LazyBatchNorm1d")
    assert second.notes == "lazy; OffAfter"


def test_a_summary_prints_as_a_table():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm1d(3))
    lines = str(ghostnoise.summary(ghostnoise.convert(model, "gbn", 4))).splitlines()
    assert lines[0].split() == ["name", "layer", "was", "method", "ghost_size", "scope", "notes"]
    assert lines[2].split() == ["0", "GhostBatchNorm2d", "BatchNorm2d", "gbn", "4", "local"]
    words = ["layer", "---------", "Ghost", "Ghost"]
    starts = [line.index(word) for line, word in zip(lines[:4], words, strict=True)]
    assert len({*starts[:1], *starts[2:]}) == 1
    assert lines[4:] == ["2 layers: gbn, ghost size 4"]
    assert repr(ghostnoise.summary(nn.Linear(2, 2))) == "no ghostnoise layers"
    assert len(ghostnoise.summary(nn.Linear(2, 2))) == 0


def test_equal_layers_share_a_line_of_the_table():
    model = ghostnoise.convert(nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(48))), "gni", {"1?": 8, "*": 4})
    summary = ghostnoise.summary(model)
    assert [row.name for row in summary] == [str(number) for number in range(48)]
    *_, first, second, last = str(summary).splitlines()
    assert first.startswith("0, 1, 2 and 35 more  ")
    assert second.startswith("10, 11, 12 and 7 more  ")
    assert last == "48 layers: 38 gni, ghost size 4; 10 gni, ghost size 8"
    assert str(ghostnoise.summary(ghostnoise.convert(model, "bn"))).endswith("48 layers: bn")


# EvalNorm, which is not an nn.BatchNorm*d.


@every_rank
def test_eval_norm_converts_in_place_both_ways(dimensions):
    plain, evaluating = getattr(nn, f"BatchNorm{dimensions}d"), getattr(ghostnoise, f"EvalNorm{dimensions}d")
    for layer in (plain(3), evaluating(3, ghost_size=4)):
        model = ghostnoise.convert(nn.Sequential(layer), "en", 4)
        assert model[0] is layer
        assert type(layer) is evaluating
        model(example(dimensions))
        ghostnoise.convert(model, "gbn", 4)
        assert type(layer) is getattr(ghostnoise, f"GhostBatchNorm{dimensions}d")
        with pytest.warns(UserWarning, match="1 EvalNorm layers become plain batch norm"):
            ghostnoise.revert(ghostnoise.convert(model, "en", 4))
        assert type(layer) is plain


# What a conversion leaves of the former class: nothing that changes how the layer runs.


def step(layer, seed):
    """Return output, gradients and buffers of a training step."""
    torch.manual_seed(seed)
    x = torch.randn(8, 3, 2, 2, requires_grad=True)
    layer.zero_grad()
    y = layer(x)
    y.square().mul(torch.rand_like(y)).sum().backward()
    return [y, x.grad, *(each.grad for each in layer.parameters()), *(each.clone() for each in layer.buffers())]


def fresh(layer):
    """Return a layer of the same class and options, built anew, with the same parameters and buffers."""
    options = {}
    if isinstance(layer, NormLayer):
        hidden = ("process_group", "uneven", "history")
        options = {name: getattr(layer, name) for name in layer.options if name[0] != "_" and name not in hidden}
        options |= {"history": 0} if "history" in layer.options else {}
    made = type(layer)(3, **options)
    made.load_state_dict(layer.state_dict())
    return made


@pytest.mark.filterwarnings("ignore:.* layers become plain batch norm")
@pytest.mark.parametrize("by_revert", [False, True])
@pytest.mark.parametrize("first", [*SIZES, None])
def test_a_layer_that_was_trained_trains_as_its_new_method(first, by_revert):
    """Bit for bit as a layer that has never been another one, and nothing else is left in it."""
    for second in (*SIZES, None):
        model = nn.Sequential(nn.BatchNorm2d(3))
        for method in (first, second):
            if method is None or by_revert:
                ghostnoise.revert(model)
            if method is not None:
                ghostnoise.convert(model, method, **SIZES[method])
            for seed in (1, 2):
                expected = step(fresh(model[0]), seed) if method is second else None
                found = step(model[0], seed)
                if expected is not None:
                    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True)), second
        added = {"_ghostnoise_origin", "_ghostnoise_path"} if second is not None else set()
        made = fresh(model[0])
        step(made, 0)
        assert vars(model[0]).keys() == vars(made).keys() | added, second


@pytest.mark.parametrize("how", ["model", "in place", "layer"])
@pytest.mark.parametrize(
    ("first", "second"), [(None, "gbn"), ("bn", "gbn"), ("gbn", "bn"), ("en", "gni"), ("gni", None), ("gni", "agni")]
)
def test_a_layer_that_was_compiled_runs_as_its_new_method(first, second, how):
    torch._dynamo.reset()
    model = nn.Sequential(nn.BatchNorm2d(3))
    if first is not None:
        ghostnoise.convert(model, first, **SIZES[first])
    run = torch.compile(model, backend="eager") if how == "model" else model
    if how != "model":
        (model if how == "in place" else model[0]).compile(backend="eager")
    for _ in range(2):
        run(example(2))
    ghostnoise.revert(model) if second is None else ghostnoise.convert(model, second, **SIZES[second])
    expected = seeded(fresh(model[0]), example(2))
    torch.testing.assert_close(seeded(run, example(2)), expected)


def test_kept_samples_stay_with_a_converted_layer():
    """They are moments of its input, which no method changes."""
    model = ghostnoise.convert(nn.Sequential(nn.BatchNorm2d(3)), "gni", 4)
    ghostnoise.calibrate(model, [example(2)], keep=5)
    kept = model[0].kept
    assert ghostnoise.convert(model, "agni", 4)[0].kept is kept
    with ghostnoise.sampling(model.eval()):
        assert not torch.equal(model(example(2)), model(example(2)))
    assert not hasattr(ghostnoise.revert(model)[0], "kept")
    assert ghostnoise.convert(model, "gni", 4)[0].kept is None


def test_a_conversion_inside_of_sampling_ends_it_for_the_layer():
    x = example(2)
    for change in (lambda model: ghostnoise.convert(model, "agni", 4), ghostnoise.revert):
        model = ghostnoise.convert(nn.Sequential(nn.BatchNorm2d(3)), "gni", 4)
        ghostnoise.calibrate(model, [x], keep=5)
        expected = model.eval()(x)
        with ghostnoise.sampling(model), ghostnoise.sampling(model):
            change(model)
            assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
        assert "_sampling" not in vars(model[0])


def test_attributes_of_others_with_the_names_of_ours_are_not_touched():
    class Grouped(nn.BatchNorm2d):
        def __init__(self, channels):
            super().__init__(channels)
            self.cls_to_become = "theirs"

    for name in ("process_group", "kept", "components"):
        model = nn.Sequential(nn.BatchNorm2d(3), Grouped(3))
        setattr(model[1], name, theirs := nn.Parameter(torch.ones(1)))
        with pytest.raises(ValueError, match=rf"'1' \(Grouped\) has an attribute '{name}' of its own, which .* needs"):
            ghostnoise.convert(model, "gni", 4)
        assert type(model[0]) is nn.BatchNorm2d
        assert getattr(ghostnoise.revert(model)[1], name) is theirs
        delattr(model[1], name)
        ghostnoise.convert(model, "gni", 4)
        assert "GhostNoiseBatchNorm2d" in str(ghostnoise.summary(model))
        assert ghostnoise.revert(model)[1].cls_to_become == "theirs"
