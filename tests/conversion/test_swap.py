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
from ghostnoise import GhostBatchNorm, GhostNoiseBatchNorm
from ghostnoise.conversion.swap import Method, check_options, name_of
from ghostnoise.conversion.variants import activated
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


def test_subclasses_without_a_forward_of_their_own():
    model = nn.Sequential(Renamed(3))
    ghostnoise.convert(model, "gni", 4)
    assert type(model[0]) is ghostnoise.GhostNoiseBatchNorm2d
    model(example(2))
    assert ghostnoise.revert(model)[0].greeting() == "hello"


def test_subclasses_that_accept_other_ranks_still_do():
    model = ghostnoise.convert(nn.Sequential(AnyRank(3)), "gni", 4)
    assert type(model[0]) is GhostNoiseBatchNorm
    for dimensions in SHAPES:
        assert model(example(dimensions)).shape == SHAPES[dimensions]
    assert type(ghostnoise.revert(model)[0]) is AnyRank


def test_subclasses_of_layers_of_this_library():
    class Own(ghostnoise.GhostBatchNorm2d):
        def forward(self, x):
            return x

    with pytest.raises(ValueError, match=r"'0' \(Own\) is a .*Own, which defines its own forward"):
        ghostnoise.convert(nn.Sequential(Own(3, ghost_size=4)), "gni", 4)
    class_without = type("Without", (ghostnoise.GhostBatchNorm2d,), {})
    model = ghostnoise.convert(nn.Sequential(class_without(3, ghost_size=4)), "gni", 4)
    assert type(model[0]) is ghostnoise.GhostNoiseBatchNorm2d


def test_an_attribute_with_the_name_of_an_option():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    model[1].components = nn.Parameter(torch.ones(1))
    with pytest.raises(
        ValueError, match=r"'1' \(BatchNorm2d\) has an attribute 'components' of its own, which .* needs"
    ):
        ghostnoise.convert(model, "gni", 4)
    assert type(model[0]) is nn.BatchNorm2d


# Lazy.


def lazy(dimensions, **options):
    return nn.Sequential(getattr(nn, f"LazyBatchNorm{dimensions}d")(**options))


@every_rank
@every_method
def test_lazy_layers_stay_lazy_until_the_first_batch(dimensions, method):
    model = ghostnoise.convert(lazy(dimensions), method, **SIZES[method])
    assert isinstance(model[0], getattr(nn, f"LazyBatchNorm{dimensions}d"))
    assert model[0].has_uninitialized_params()
    spec, fixed = registry.names()[method]
    built = spec.norms[dimensions - 1](3, **SIZES[method], **fixed)
    torch.manual_seed(0)
    output = model(example(dimensions))
    torch.manual_seed(0)
    assert torch.equal(output, built(example(dimensions)))
    assert type(model[0]) is type(built)
    assert repr(model[0]) == repr(built)


@pytest.mark.parametrize("seen", [False, True])
def test_lazy_layers_revert(seen):
    model = ghostnoise.convert(lazy(2), "gbn", 4)
    if seen:
        model(example(2))
    ghostnoise.revert(model)
    assert type(model[0]) is (nn.BatchNorm2d if seen else nn.LazyBatchNorm2d)
    assert "cls_to_become" not in vars(model[0])
    model(example(2))
    assert type(model[0]) is nn.BatchNorm2d


def test_lazy_layers_convert_again():
    model = ghostnoise.convert(ghostnoise.convert(lazy(2), "gni", 4), "gbn", 2)
    assert "noise_eps" not in vars(model[0])
    model(example(2))
    assert type(model[0]) is ghostnoise.GhostBatchNorm2d
    ghostnoise.convert(model, "gni", 4)
    assert type(model[0]) is ghostnoise.GhostNoiseBatchNorm2d
    model(example(2))


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


def test_lazy_layers_pickle():
    """They can be pickled, as torch's own can; torch refuses to deep-copy lazy modules."""
    model = ghostnoise.convert(lazy(2), "gbn", 4)
    twin = pickle.loads(pickle.dumps(model))
    twin(example(2))
    assert type(twin[0]) is ghostnoise.GhostBatchNorm2d
    assert model[0].has_uninitialized_params()


# Synchronized.


@every_method
def test_synchronized_layers_accept_any_rank(method):
    model = nn.Sequential(nn.SyncBatchNorm(3))
    ghostnoise.convert(model, method, **SIZES[method], scope="local")
    assert type(model[0]) is registry.names()[method][0].norm
    assert model[0].process_group is None
    for dimensions in SHAPES:
        assert model(example(dimensions)).shape == SHAPES[dimensions]
    assert model(torch.randn(8, 3)).shape == (8, 3)


def test_synchronized_layers_revert():
    group = object()
    model = nn.Sequential(nn.SyncBatchNorm(3, process_group=group))
    ghostnoise.revert(ghostnoise.convert(model, "gbn", 4, scope="local"))
    assert type(model[0]) is nn.SyncBatchNorm
    assert model[0].process_group is group
    assert type(ghostnoise.revert(nn.Sequential(GhostBatchNorm(3, ghost_size=4)))[0]) is nn.SyncBatchNorm


# Parametrized.


def test_parametrized_layers_keep_their_parametrizations():
    model = nn.Sequential(nn.BatchNorm2d(3))
    parametrize.register_parametrization(model[0], "weight", Doubled())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.eval()(example(2))
    ghostnoise.convert(model, "gbn", 4)
    assert isinstance(model[0], ghostnoise.GhostBatchNorm2d)
    assert torch.equal(model(example(2)), before)
    assert torch.equal(model[0].weight, 2 * model[0].parametrizations.weight.original)
    model.train()(example(2)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].parametrizations.weight.original, torch.ones(3))
    twin = copy.deepcopy(model)
    assert torch.equal(twin.eval()(example(2)), model.eval()(example(2)))
    assert ghostnoise.summary(model)[0][:3] == ("0", "GhostBatchNorm2d", "BatchNorm2d")
    assert "parametrized: weight" in ghostnoise.summary(model)[0].notes
    ghostnoise.convert(model, "gni", 4)
    assert type(model[0]).__mro__[1] is ghostnoise.GhostNoiseBatchNorm2d
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is ghostnoise.GhostNoiseBatchNorm2d


def test_parametrized_layers_revert():
    model = nn.Sequential(nn.BatchNorm2d(3))
    parametrize.register_parametrization(model[0], "weight", Doubled())
    ghostnoise.revert(ghostnoise.convert(model, "gni", 4))
    assert type(model[0]).__mro__[1] is nn.BatchNorm2d
    assert torch.equal(model[0].weight, torch.full((3,), 2.0))
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.BatchNorm2d


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
    drop.eval()
    torch.manual_seed(0)
    ours = model[0].train()
    drop.eval()
    output = ours(example(2))
    torch.manual_seed(0)
    spec, fixed = registry.names()[method]
    assert torch.equal(output, act(spec.norms[1](3, **SIZES[method], **fixed)(example(2))))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert type(twin[0]) is activated(spec.norms[1])
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


# Methods and their options.


@pytest.mark.parametrize("name", list(registry.names()))
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


# EvalNorm, which is not an nn.BatchNorm*d.


@every_rank
def test_eval_norm_converts_in_place_both_ways(dimensions):
    plain = getattr(nn, f"BatchNorm{dimensions}d")
    model = nn.Sequential(plain(3))
    layer = model[0]
    ghostnoise.convert(model, "en", 4)
    assert model[0] is layer
    assert type(layer) is getattr(ghostnoise, f"EvalNorm{dimensions}d")
    assert not isinstance(layer, plain)
    model(example(dimensions))
    ghostnoise.convert(model, "gbn", 4)
    assert type(layer) is getattr(ghostnoise, f"GhostBatchNorm{dimensions}d")
    assert isinstance(layer, plain)
    with pytest.warns(UserWarning, match="1 EvalNorm layers become plain batch norm"):
        ghostnoise.revert(ghostnoise.convert(model, "en", 4))
    assert type(layer) is plain


@every_rank
def test_eval_norm_built_by_hand(dimensions):
    model = nn.Sequential(getattr(ghostnoise, f"EvalNorm{dimensions}d")(3, ghost_size=4))
    converted = ghostnoise.convert(copy.deepcopy(model), "gni", 4)
    assert type(converted[0]) is getattr(ghostnoise, f"GhostNoiseBatchNorm{dimensions}d")
    plain = getattr(nn, f"BatchNorm{dimensions}d")
    assert type(ghostnoise.revert(converted)[0]) is plain
    with pytest.warns(UserWarning, match="EvalNorm"):
        assert type(ghostnoise.revert(model)[0]) is plain


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
    if isinstance(layer, NormLayer):
        hidden = ("process_group", "uneven")
        options = {name: getattr(layer, name) for name in layer.options if name[0] != "_" and name not in hidden}
        if options.get("history", 0) is None:
            options["history"] = 0
        built = type(layer)(3, **options)
    else:
        built = type(layer)(3)
    built.load_state_dict(layer.state_dict())
    return built


@pytest.mark.filterwarnings("ignore:.* layers become plain batch norm")
@pytest.mark.parametrize("by_revert", [False, True])
@pytest.mark.parametrize("first", [*SIZES, None])
@pytest.mark.parametrize("second", [*SIZES, None])
def test_a_layer_that_was_trained_trains_as_its_new_method(first, second, by_revert):
    """Bit for bit as a layer that has never been another one, and nothing else is left in it."""
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
                for ours, theirs in zip(found, expected, strict=True):
                    assert torch.equal(ours, theirs)
    added = {"_ghostnoise_origin", "_ghostnoise_path"} if second is not None else set()
    built = fresh(model[0])
    step(built, 0)
    assert vars(model[0]).keys() == vars(built).keys() | added


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
    built = fresh(model[0])
    torch.manual_seed(0)
    expected = built(example(2))
    torch.manual_seed(0)
    torch.testing.assert_close(run(example(2)), expected)


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
        model.eval()
        expected = model(x)
        with ghostnoise.sampling(model), ghostnoise.sampling(model):
            change(model)
            assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
        assert "_sampling" not in vars(model[0])


def test_attributes_of_others_with_the_names_of_ours_are_not_touched():
    class Grouped(nn.BatchNorm2d):
        def __init__(self, channels):
            super().__init__(channels)
            self.process_group, self.cls_to_become = "theirs", "also theirs"

    for name in ("process_group", "kept"):
        model = nn.Sequential(nn.BatchNorm2d(3))
        setattr(model[0], name, "theirs")
        with pytest.raises(ValueError, match=rf"'0' \(BatchNorm2d\) has an attribute '{name}' of its own"):
            ghostnoise.convert(model, "gni", 4)
        assert vars(ghostnoise.revert(model)[0])[name] == "theirs"
    model = nn.Sequential(Grouped(3))
    with pytest.raises(ValueError, match=r"'0' \(Grouped\) has an attribute 'process_group' of its own"):
        ghostnoise.convert(model, "gni", 4)
    del model[0].process_group
    ghostnoise.convert(model, "gni", 4)
    assert "GhostNoiseBatchNorm2d" in str(ghostnoise.summary(model))
    assert ghostnoise.revert(model)[0].cls_to_become == "also theirs"
