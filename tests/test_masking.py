"""Masks of a block of code: which mask a layer takes, in which thread, in graphs, and when a pass runs again."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import ghostnoise
from ghostnoise import masking
from support.converted import assert_same
from support.ragged import lengths_mask

MASK = lengths_mask([8, 3, 5, 0, 8, 6, 2, 7], 8)
OTHER = lengths_mask([1, 8, 2, 4, 8, 5, 3, 6], 8)
ALL = torch.ones_like(MASK)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert not masking.active()
    assert not masking._local.state.blocks


def x(seed=0, length=8):
    return torch.randn(8, 3, length, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def network(stride=1):
    torch.manual_seed(0)
    layers = nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 5, 1, stride), nn.BatchNorm1d(5), nn.ReLU()
    return nn.Sequential(*layers).double()


def converted(method="gni", stride=1, **options):
    sizes = {} if method in ("bn", "xbn", "brn") else {"ghost_size": 4}
    return ghostnoise.convert(network(stride), method, **sizes, **options)


def by_hand(model, x, *masks):
    """Run the layers of a converted network one by one, with explicit masks."""
    left = iter(masks)
    for layer in model:
        x = layer(x, next(left)) if isinstance(layer, nn.BatchNorm1d) else layer(x)
    return x


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("method", ["bn", "gbn", "xbn", "gni", "agni", "brn"])
def test_a_converted_model_takes_the_mask_of_the_block(method, training):
    model = converted(method).train(training)
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    with ghostnoise.masked(MASK):
        y = model(x())
    torch.manual_seed(1)
    assert torch.equal(y, by_hand(twin, x(), MASK, MASK))
    assert_same(model.state_dict(), twin.state_dict())
    assert torch.equal(copy.deepcopy(twin)(x()).isfinite().all(), torch.tensor(True))


def test_the_result_does_not_depend_on_the_padding():
    model, given = converted("gbn"), x()
    with ghostnoise.masked(MASK):
        y = model(given)
        again = model(given.masked_fill(~MASK.unsqueeze(1), torch.nan))
    assert torch.equal(y, again)


def test_masks_of_other_shapes():
    model = converted("gbn", stride=2)
    with ghostnoise.masked(MASK, MASK[:, ::2]):
        y = model(x())
    assert torch.equal(y, by_hand(converted("gbn", stride=2), x(), MASK, MASK[:, ::2]))


def test_a_layer_whose_positions_differ_raises_with_its_name():
    model = converted("gbn", stride=2)
    before = copy.deepcopy(model[4].state_dict())
    message = (
        r"^'4', a GhostBatchNorm1d\(5, .*ghost_size=4.*\) got an input of shape \(8, 5, 4\) inside of "
        r"ghostnoise.masked, which has masks of shape \(8, 8\).*: must have one for its positions, \(8, 4\); give this"
    )
    with ghostnoise.masked(MASK), pytest.raises(ValueError, match=message):
        model(x())
    assert_same(model[4].state_dict(), before)
    with ghostnoise.masked(MASK), pytest.raises(ValueError, match=r"^BatchNorm1d\(3, .*\) got an input of shape"):
        ghostnoise.BatchNorm1d(3).double()(x(length=5))
    with (
        ghostnoise.masked(MASK),
        pytest.raises(ValueError, match=r"^BatchNorm1d got .*expected 2 or 3D input \(got 4D"),
    ):
        ghostnoise.BatchNorm1d(3).double()(x().unsqueeze(2))


def test_inserted_noise_raises_with_its_name_and_is_masked_in_eval_too():
    model = ghostnoise.convert(network(), "gni", 4, after=nn.Conv1d)
    with ghostnoise.masked(MASK), pytest.raises(ValueError, match=r"^'0\.ghost_noise', a GhostNoise\("):
        model(x(length=5))
    with ghostnoise.masked(MASK):
        hidden = model.eval()[0](x())
    assert not hidden[~MASK.unsqueeze(1).expand_as(hidden)].any()
    assert torch.equal(hidden[MASK[:, None].expand_as(hidden)], network()[0](x())[MASK[:, None].expand_as(hidden)])


def test_names_are_removed_with_the_conversion():
    assert "_ghostnoise_path" not in vars(ghostnoise.revert(converted("gbn"))[1])


def test_inputs_without_positions():
    """A head after pooling: samples with a valid position contribute, or those of a mask (B,)."""
    given, layer = x()[..., 0], ghostnoise.BatchNorm1d(3).double()
    chosen = torch.tensor([True, False] * 4)
    for masks, valid in (((MASK,), MASK.any(1)), ((MASK, chosen), chosen), ((chosen,), chosen)):
        with ghostnoise.masked(*masks):
            y = layer(given)
        assert torch.equal(y, layer(given, valid))
    flattened = x().transpose(1, 2).flatten(0, 1)
    with ghostnoise.masked(MASK), pytest.raises(ValueError, match=r"input of shape \(64, 3\) .* positions, \(64,\)"):
        layer(flattened)
    with ghostnoise.masked(MASK, MASK.flatten()):
        assert torch.equal(layer(flattened), layer(flattened, MASK.flatten()))


def test_an_explicit_mask_and_an_inner_block_take_precedence():
    layer, given = ghostnoise.BatchNorm1d(3, track_running_stats=False).double(), x()
    inner = ghostnoise.masked(OTHER)
    with ghostnoise.masked(MASK):
        assert torch.equal(layer(given, OTHER), layer(given, mask=OTHER))
        with inner, inner:
            assert torch.equal(layer(given), layer(given, OTHER))
        assert torch.equal(layer(given), layer(given, MASK))
    assert torch.equal(layer(given, ALL).isfinite().all(), torch.tensor(True))
    torch.testing.assert_close(layer(given), layer(given, ALL))


def test_an_error_ends_the_block():
    with pytest.raises(ZeroDivisionError), ghostnoise.masked(MASK):
        _ = 1 / 0


def test_a_block_is_that_of_its_thread():
    found = []
    with ghostnoise.masked(MASK):
        thread = threading.Thread(target=lambda: found.append(masking.active()))
        thread.start()
        thread.join()
        assert masking.active()
    assert found == [False]


def test_blocks_may_end_in_any_order():
    """As those of generators do."""
    layer, given = ghostnoise.BatchNorm1d(3, track_running_stats=False).double(), x()

    def outputs(mask):
        with ghostnoise.masked(mask):
            while True:
                yield layer(given)

    first = outputs(MASK)
    assert torch.equal(next(first), layer(given, MASK))
    with ghostnoise.masked(OTHER):
        first.close()
        assert torch.equal(layer(given), layer(given, OTHER))
    assert not masking.active()


def test_one_object_in_several_threads():
    block, layer, given = ghostnoise.masked(MASK), ghostnoise.BatchNorm1d(3, track_running_stats=False).double(), x()
    inside, outside = threading.Barrier(2), []

    def run():
        with block:
            inside.wait()
            outside.append(torch.equal(layer(given), layer(given, MASK)))
            inside.wait()
        outside.append(not masking.active())

    thread = threading.Thread(target=run)
    thread.start()
    with block:
        inside.wait()
        inside.wait()
        thread.join()
        assert torch.equal(layer(given), layer(given, MASK))
    assert outside == [True, True]


BAD = [
    ((MASK.float(),), r"masked got a mask of dtype torch.float32: must be .* torch.bool"),
    ((~ALL,), r"masked got a mask that is False everywhere: at least one position .* skip batches"),
    ((MASK, OTHER), r"masked got two masks of shape \(8, 8\): must be one for each shape; pass mask="),
    ((MASK, None), r"masked got a mask of type NoneType"),
    ((torch.tensor(True),), r"masked got a mask of shape \(\)"),
]


@pytest.mark.parametrize(("masks", "message"), BAD)
def test_bad_masks(masks, message):
    with pytest.raises(ValueError, match=message):
        ghostnoise.masked(*masks)


# Recomputation.


def checkpointed(*flavours):
    """Checkpoints inside of each other; True is reentrant."""

    def wrap(run, flavour):
        return lambda x: checkpoint(run, x, use_reentrant=flavour)

    def run(model):
        if len(flavours) == 1:
            return wrap(model, flavours[0])
        return wrap(lambda x: wrap(model[3:], flavours[1])(wrap(model[:3], flavours[1])(x)), flavours[0])

    return run


def micro_batches(model, run, order, inputs):
    """Two micro-batches with different masks, and backward passes after both blocks."""
    torch.manual_seed(5)
    losses = []
    for given, mask in zip(inputs, (MASK, OTHER), strict=True):
        with ghostnoise.masked(mask):
            y = run(given)
        losses.append(y.square().sum() + y.sin().sum())
    for loss in [sum(losses)] if order is None else [losses[k] for k in order]:
        loss.backward()
    gradients = {f"x{k}": given.grad for k, given in enumerate(inputs)}
    gradients |= {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradients | model.state_dict()


# The first input of a reentrant checkpoint inside of another one needs a gradient.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("flavours", [(True,), (False,), (True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), None])
def test_a_pass_that_runs_again_takes_the_mask_of_its_block(flavours, order):
    """Also if both micro-batches have the same values, and only the masks differ."""
    for method, seeds in (("gni", (0, 0)), ("brn", (0, 1))):
        results = []
        for run in (lambda model: model, checkpointed(*flavours)):
            model, inputs = converted(method), [x(seed).requires_grad_() for seed in seeds]
            results.append(micro_batches(model, run(model), order, inputs))
        assert_same(*results)


def test_backward_passes_inside_of_another_block():
    def gradient(run):
        model, given = converted("gbn"), x().requires_grad_()
        with ghostnoise.masked(MASK):
            y = run(model)(given)
        with ghostnoise.masked(OTHER):
            model(x(1))
            y.square().sum().backward()
        return given.grad

    assert torch.equal(gradient(checkpointed(False)), gradient(lambda model: model))
    assert torch.equal(gradient(checkpointed(True)), gradient(lambda model: model))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_pass_without_masks_runs_again_without_masks(use_reentrant):
    def gradient(run):
        model, given = converted("gbn"), x().requires_grad_()
        with ghostnoise.masked(MASK):
            masked = run(model)(x(1).requires_grad_())
        plain = run(model)(given)
        with ghostnoise.masked(OTHER):
            (plain.square().sum() + masked.square().sum()).backward()
        return given.grad

    assert torch.equal(gradient(checkpointed(use_reentrant)), gradient(lambda model: model))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_block_inside_of_a_checkpoint(use_reentrant):
    model = converted("gbn")

    def run(x, mask):
        with ghostnoise.masked(mask):
            return model(x)

    inputs = [x().requires_grad_() for _ in range(2)]
    run(inputs[0], MASK).square().sum().backward()
    y = checkpoint(run, inputs[1], MASK, use_reentrant=use_reentrant)
    with ghostnoise.masked(OTHER):
        y.square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)


@pytest.mark.parametrize("gradients", [True, False])
def test_masks_are_not_kept_where_nothing_runs_again(gradients):
    layer, mask = ghostnoise.BatchNorm1d(3).double(), MASK.clone()
    with torch.set_grad_enabled(gradients), ghostnoise.masked(mask):
        layer(x())
    unused = weakref.ref(mask)
    del mask
    gc.collect()
    assert unused() is None


# Graphs.


@pytest.fixture
def counted():
    """A backend of torch.compile that counts graphs."""
    torch._dynamo.reset()
    yield CompileCounterWithBackend("eager")
    torch._dynamo.reset()


def test_one_graph_for_all_masks(counted):
    model, plain = (ghostnoise.GhostNoiseBatchNorm1d(3, ghost_size=4, dtype=torch.float64) for _ in range(2))
    compiled = torch.compile(model, backend=counted, fullgraph=True)
    for mask in (None, MASK, OTHER, None):
        steps = []
        for run in (compiled, plain):
            given = x().requires_grad_()
            torch.manual_seed(0)
            if mask is None:
                y = run(given)
            else:
                with ghostnoise.masked(mask):
                    y = run(given)
            steps.append((y, *torch.autograd.grad(y.square().sum(), given)))
        torch.testing.assert_close(*steps, rtol=1e-9, atol=1e-9)
    assert counted.frame_count == 2, "with masks, and without"
    torch.testing.assert_close(list(model.buffers()), list(plain.buffers()))


def test_a_block_inside_of_a_graph(counted):
    model, twin = (ghostnoise.BatchNorm1d(3, dtype=torch.float64) for _ in range(2))

    @torch.compile(backend=counted, fullgraph=True)
    def run(x, mask):
        with ghostnoise.masked(mask):
            return model(x)

    for mask in (MASK, OTHER):
        with ghostnoise.masked(mask):
            expected = twin(x())
        torch.testing.assert_close(run(x(), mask), expected)
    assert counted.frame_count == 1
    assert not masking.active()


def test_a_graph_break_inside_of_a_block(counted):
    """The block continues after the break, and ends as it would in eager mode."""
    model, twin = (ghostnoise.BatchNorm1d(3, dtype=torch.float64) for _ in range(2))
    inner = ghostnoise.masked(OTHER)

    def run(model, x, mask):
        with ghostnoise.masked(mask):
            y = model(x)
            torch._dynamo.graph_break()
            with inner:  # created outside of the graph, which is then not captured at all
                y = y + model(x)
            return y + model(x)

    compiled = torch.compile(run, backend=counted)
    for mask in (MASK, ALL):
        torch.testing.assert_close(compiled(model, x(), mask), run(twin, x(), mask))
        assert not masking.active()
    assert_same(model.state_dict(), twin.state_dict())


def test_transforms():
    model = converted("gbn").requires_grad_(False)
    for layer in (model[1], model[4]):
        layer.track_running_stats = False
    given = x().requires_grad_()
    with ghostnoise.masked(MASK):
        transformed = torch.func.grad(lambda x: model(x).square().sum())(x())
        (eager,) = torch.autograd.grad(model(given).square().sum(), given)
    torch.testing.assert_close(transformed, eager)


def test_autocast():
    model, given = converted("gni").float(), x().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), ghostnoise.masked(MASK):
        y = model(given)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert not y[~MASK.unsqueeze(1).expand_as(y)].any()
    assert given.grad.isfinite().all()
