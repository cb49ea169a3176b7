"""Code of others around the layers: subclasses, modes of torch, and nested checkpoints, from call to call."""

import contextlib
import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import ghostnoise
from ghostnoise import functional

LAYERS = {
    "bn": lambda: ghostnoise.BatchNorm2d(3),
    "gbn": lambda: ghostnoise.GhostBatchNorm2d(3, ghost_size=4),
    "xbn": lambda: ghostnoise.ExclusiveBatchNorm2d(3, ghost_size=4),
    "brn": lambda: ghostnoise.BatchRenorm2d(3),
    "gni": lambda: ghostnoise.GhostNoiseBatchNorm2d(3, ghost_size=4),
    "agni": lambda: ghostnoise.AnalyticalGhostNoiseBatchNorm2d(3, ghost_size=4),
    "history": lambda: ghostnoise.GhostNoiseBatchNorm2d(3, ghost_size=4, history=6),
}
layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def batch(seed=0):
    return torch.randn(8, 3, 2, 2, generator=torch.Generator().manual_seed(seed))


class Doubled(ghostnoise.BatchNorm2d):
    """A subclass with a function of its own."""

    function = staticmethod(lambda *args, **options: 2 * functional.batch_norm(*args, **options))


class Transformed(ghostnoise.BatchNorm2d):
    """A subclass that changes its input."""

    def forward(self, input, mask=None):
        return super().forward(input.exp(), mask)


class Scheduled(ghostnoise.GhostBatchNorm2d):
    """A subclass whose settings are properties that change from call to call."""

    @property
    def ghost_size(self):
        return self.size

    @ghost_size.setter
    def ghost_size(self, value):
        self.size = value

    @property
    def eps(self):
        return 1e-5 * self.size

    @eps.setter
    def eps(self, value):
        pass


@pytest.mark.parametrize("compiled", [False, True])
def test_subclasses_are_what_they_say_in_every_call(compiled):
    doubled, transformed, scheduled = Doubled(3), Transformed(3), Scheduled(3, ghost_size=4)
    run = partial(torch.compile, backend="aot_eager") if compiled else (lambda layer: layer)
    calls = [run(layer) for layer in (doubled, transformed, scheduled)]
    for seed in range(4):
        x = batch(seed)
        plain = nn.BatchNorm2d(3)
        torch.testing.assert_close(calls[0](x), 2 * plain(x))
        torch.testing.assert_close(calls[1](x), plain(x.exp()))
        scheduled.size = size = 1 + seed
        wanted = functional.ghost_batch_norm(x, None, None, training=True, eps=1e-5 * size, ghost_size=size)
        torch.testing.assert_close(calls[2](x), wanted)


RENORM = partial(functional.batch_renorm, training=True, warmup_steps=0, transition_steps=0)


def in_fake_mode(layer):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        RENORM(*(mode.from_tensor(t) for t in (batch(), torch.zeros(3), torch.ones(3))))
        layer(mode.from_tensor(batch()))


def in_func(layer):
    torch.func.grad(lambda x: RENORM(x, torch.zeros(3), torch.ones(3)).square().sum())(batch())
    torch.func.grad(lambda x: layer(x).square().sum())(batch())


def in_make_fx(layer):
    make_fx(copy.deepcopy(layer).eval())(batch())


def in_inference_mode(layer):
    with torch.inference_mode():
        layer(batch())


MODES = {"fake": in_fake_mode, "func": in_func, "make_fx": in_make_fx, "inference": in_inference_mode}


@layers
@pytest.mark.parametrize("enter", MODES.values(), ids=MODES)
def test_real_calls_after_those_of_a_mode_are_as_before(make, enter):
    layer, twin = make(), make()
    with contextlib.suppress(RuntimeError, ValueError):  # of torch, and of histories, which keep real tensors only
        enter(layer)
    layer.load_state_dict(twin.state_dict())
    if layer.__dict__.get("history") is not None:
        layer.history.clear()
    for _ in range(2):
        made = []
        for each in (layer, twin, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
            torch.manual_seed(3)
            x = batch(1).requires_grad_()
            y = each(x)
            made.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *each.parameters()])])
        assert all(torch.equal(one, other) for one, other in zip(*made[:2], strict=True))


def test_values_of_masks_are_checked_under_a_dispatch_mode():
    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Nothing(), pytest.raises(ValueError, match="valid"):
        ghostnoise.BatchNorm2d(3)(batch(), torch.zeros(8, 2, 2, dtype=torch.bool))


@layers
@pytest.mark.parametrize("reentrant", [False, True])
def test_nested_checkpoints_of_a_layer_that_is_used_twice(make, reentrant):
    from torch.utils.checkpoint import checkpoint

    def gradients(run):
        torch.manual_seed(0)
        layer, x = make(), batch().requires_grad_()
        torch.manual_seed(1)
        for _ in range(2):  # the same batch twice, before any backward pass
            y = run(layer, x)
        layer(batch(2))  # the state moves on
        torch.manual_seed(5)
        return torch.autograd.grad(y.pow(3).sum(), [x, *layer.parameters()]) if not reentrant else backward(y, x, layer)

    def backward(y, x, layer):
        y.pow(3).sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    def plain(layer, x):
        return layer(layer(x) + x)

    def nested(layer, x):
        def inner(x):
            return checkpoint(layer, x, use_reentrant=reentrant) + x

        return checkpoint(lambda x: layer(inner(x)), x, use_reentrant=reentrant)

    for one, other in zip(gradients(nested), gradients(plain), strict=True):
        torch.testing.assert_close(one, other)
