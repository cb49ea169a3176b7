"""Recomputed passes: a step with activation checkpointing equals the step without it."""

import gc
import itertools
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ghostnoise
from ghostnoise.engine import recompute
from support.ragged import lengths_mask
from support.ranks import values

SHAPE, DTYPE = (6, 3, 4), torch.float64
MASK = lengths_mask([4, 3, 2, 4, 1, 3], 4)


def seeded():
    return torch.Generator().manual_seed(3)


norm = {"num_features": 3, "dtype": DTYPE}
LAYERS = {
    "brn": lambda: ghostnoise.BatchRenorm1d(**norm, warmup_steps=0, transition_steps=0),
    "micro-batches": lambda: ghostnoise.MicroBatchNorm1d(**norm, history=9),
    "history inside": lambda: ghostnoise.GhostNoiseBatchNorm1d(**norm, ghost_size=4, history=6),
    "history": lambda: ghostnoise.GhostNoise(4, history=6),
    "draws": lambda: ghostnoise.GhostNoiseBatchNorm1d(**norm, ghost_size=4, generator=seeded()),
    "partition": lambda: ghostnoise.GhostNoise(2, draw="partition", generator=seeded()),
    "law": lambda: ghostnoise.AnalyticalGhostNoiseBatchNorm1d(**norm, ghost_size=4, generator=seeded()),
    "dropout": lambda: ghostnoise.NoisyDropout(0.3, generator=seeded()),
    "gaussian": lambda: ghostnoise.AdditiveGaussianNoise(0.3, generator=seeded()),
}


class Network(nn.Module):
    """Two layers of a kind; with `flavours`, each part and the whole are checkpointed: True is reentrant."""

    def __init__(self, kind, flavours=()):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between, self.last = LAYERS[kind](), nn.Conv1d(3, 3, 1, dtype=DTYPE), LAYERS[kind]()
        self.whole, self.part = (*(partial(checkpoint, use_reentrant=each) for each in flavours), None, None)[:2]

    def forward(self, x):
        return self.layers(x) if self.whole is None else self.whole(self.layers, x)

    def layers(self, x):
        first, last = self.first, self.last
        if self.part is not None:
            first, last = (partial(self.part, layer) for layer in (self.first, self.last))
        return last(self.between(first(x)).tanh())


def batch(seed):
    """Return one of several batches with other means and variances."""
    return values(*SHAPE, seed=seed) * (1 + seed % 3) + seed % 2


BATCHES = {
    "the same twice": lambda: [batch(0), batch(0)],
    "its flip": lambda: [batch(0), batch(0).flip(0)],
    "ten": lambda: [batch(seed) for seed in range(10)],
}
ORDERS = {
    "in order": lambda losses: losses,
    "reversed": lambda losses: losses[::-1],
    "together": lambda losses: [sum(losses)],
}


def losses_of(outputs):
    weights = torch.arange(1, outputs[0].numel() + 1, dtype=DTYPE).view_as(outputs[0])
    return [(y.square() * weights).sum() for y in outputs]


def step(model, inputs, order=ORDERS["in order"], run=None, repeat=1):
    """Run all batches before their backward passes; return gradients, buffers and the histories."""
    torch.manual_seed(1)
    leaves = [x.clone().requires_grad_() for x in inputs]
    for loss in order(losses_of([(run or model)(x) for x in leaves])):
        for left in reversed(range(repeat)):
            loss.backward(retain_graph=left > 0)
    found = [x.grad for x in leaves] + [each.grad for each in model.parameters()]
    found += [each.to(DTYPE) for each in model.buffers()]
    return found + [each for history in ghostnoise.histories(model).values() for each in history.state().values()]


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # nested
FLAVOURS = [(True,), (False,), *itertools.product((True, False), repeat=2)]
every_kind = pytest.mark.parametrize("kind", LAYERS)
every_flavour = pytest.mark.parametrize("flavours", FLAVOURS)


@every_kind
@every_flavour
@pytest.mark.parametrize("batches", BATCHES)
def test_several_batches_before_the_backward_passes(kind, flavours, batches):
    for order in ORDERS.values() if batches == "ten" else (ORDERS["in order"],):
        inputs = BATCHES[batches]()
        assert_same(step(Network(kind, flavours), inputs, order), step(Network(kind), inputs, order))


@every_kind
@every_flavour
def test_a_network_that_is_used_several_times(kind, flavours):
    """In one region, and in several regions of one graph; and two backward passes through the same graph."""
    for uses in (lambda model: lambda x: model(model(x)), lambda model: lambda x: model(x) + model(x.flip(0))):
        results = []
        for given in (flavours, ()):
            model = Network(kind, given)
            results.append(step(model, [batch(0)], run=uses(model), repeat=2))
        assert_same(*results)


@pytest.mark.parametrize("flavours", [(True,), (False,)])
@pytest.mark.parametrize("kind", ["brn", "history"])
def test_many_other_passes_before_the_backward_pass(kind, flavours):
    """Passes without gradients look like the first pass of a reentrant checkpoint."""
    results = []
    for given in (flavours, ()):
        model = Network(kind, given)

        def run(x, model=model):
            y = model(x)
            with torch.no_grad():
                for seed in range(600):
                    model.layers(batch(seed % 7))
            return y

        results.append(step(model, [batch(0)], run=run))
    assert_same(*results)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_many_masks_before_the_backward_pass(use_reentrant):
    """The mask of each pass is its own, however many blocks there have been since."""
    layer, gradients = ghostnoise.GhostBatchNorm1d(3, ghost_size=2, dtype=DTYPE), []
    for saves in (True, False):
        leaves, outputs = [batch(seed).requires_grad_() for seed in range(40)], []
        for shift, x in enumerate(leaves):
            with ghostnoise.masked(MASK.roll(shift, 0)):
                outputs.append(checkpoint(layer, x, use_reentrant=use_reentrant) if saves else layer(x))
        for loss in losses_of(outputs):
            loss.backward()
        gradients.append([x.grad for x in leaves])
    assert_same(*gradients)


def test_a_copied_checkpoint_of_another_library():
    """Megatron, DeepSpeed and fairscale have autograd functions of this name."""

    class CheckpointFunction(torch.autograd.Function):
        __qualname__ = "CheckpointFunction"

        @staticmethod
        def forward(ctx, run, x):
            ctx.run = run
            ctx.save_for_backward(x)
            with torch.no_grad():
                return run(x)

        @staticmethod
        def backward(ctx, dy):
            (x,) = (each.detach().requires_grad_() for each in ctx.saved_tensors)
            with torch.enable_grad():
                y = ctx.run(x)
            torch.autograd.backward(y, dy)
            return None, x.grad

    for method in (CheckpointFunction.forward, CheckpointFunction.backward):
        method.__code__ = method.__code__.replace(co_qualname=f"CheckpointFunction.{method.__name__}")
    model, plain = Network("brn"), Network("brn")
    inputs = BATCHES["its flip"]()
    assert_same(step(model, inputs, run=partial(CheckpointFunction.apply, model)), step(plain, inputs))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_results_of_a_first_pass_end_with_its_graph(use_reentrant):
    before, results = len(recompute._results), []

    def run(x):
        table = recompute.remembered(lambda: torch.zeros(3))
        results.append(weakref.ref(table))
        return x * x + table.sum()

    y = checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=use_reentrant)
    assert results[0]() is not None
    y.sum().backward(retain_graph=True)
    assert results[0]() is results[1]() is not None
    del y
    gc.collect()
    assert results[0]() is None
    assert len(recompute._results) == before


def test_passes_that_cannot_run_again_keep_nothing():
    model, before = Network("brn"), len(recompute._results)
    model(batch(0)).sum().backward()
    with torch.no_grad():
        model(batch(0))
    assert len(recompute._results) == before


def test_a_region_that_raises_may_be_tried_again():
    """A recomputation that ended early must not shift the results of the next one."""
    model, plain = Network("brn"), Network("brn")
    fails = [False]

    def run(x):
        y = model.first(x)
        if fails[0]:
            fails[0] = False
            raise InterruptedError
        return model.last(model.between(y).tanh())

    x = batch(0).requires_grad_()
    loss = losses_of([checkpoint(run, x, use_reentrant=True)])[0]
    fails[0] = True
    with pytest.raises(InterruptedError):
        loss.backward(retain_graph=True)
    loss.backward()
    assert_same([x.grad], step(plain, [batch(0)])[:1])


# In graphs, `torch.compile` decides what is computed again.


def compiled_steps(layer, saves, compiled, uses=2, **options):
    torch._dynamo.reset()
    step(layer, [batch(7)])  # so that there is a history

    def run(x):
        for _ in range(uses):
            x = (checkpoint(layer, x, use_reentrant=False) if saves else layer(x)).tanh()
        return x

    call = torch.compile(run, **options) if compiled else run
    return [each for seed in range(3) for each in step(layer, [batch(seed)], run=call)]


@pytest.mark.parametrize("kind", ["brn", "history inside", "history"])
def test_state_inside_of_a_checkpoint_breaks_the_graph(kind):
    """What a graph computes again would read state that the first pass has updated."""
    assert_same(*(compiled_steps(LAYERS[kind](), *flags, backend="eager") for flags in ((True, True), (False, False))))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"inside of a checkpoint under torch\.compile: the graph"):
        compiled_steps(LAYERS[kind](), True, True, backend="eager", fullgraph=True)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_masks_and_ghost_batches_inside_of_a_checkpoint_are_in_the_graph(backend):
    results = []
    for flags in ((True, True), (False, False)):
        with ghostnoise.masked(MASK):
            layer = ghostnoise.GhostBatchNorm1d(**norm, ghost_size=2)
            results.append(compiled_steps(layer, *flags, backend=backend, fullgraph=True))
    assert_same(*results)
