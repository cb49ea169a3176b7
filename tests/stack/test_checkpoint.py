"""Activation checkpointing: the same noise when the forward pass runs again, and every batch counts once."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import ghostnoise
from support.converted import METHODS, assert_same, converted, step, twins
from support.models import images, tokens, transformer

both_modes = pytest.mark.parametrize("use_reentrant", [True, False])


@both_modes
@pytest.mark.parametrize("method", METHODS)
def test_a_step_is_that_without_checkpointing(method, use_reentrant):
    model, plain = twins(method)
    ours = step(lambda x: checkpoint(model, x, use_reentrant=use_reentrant), model)
    assert_same(ours, step(plain, plain))
    assert model[1].num_batches_tracked.item() == 4


@both_modes
def test_segments_and_segments_of_segments(use_reentrant):
    model, plain = twins("gni")

    def run(x):
        inner = checkpoint_sequential(model[:3], 2, x, use_reentrant=use_reentrant)
        return checkpoint(lambda x: checkpoint(model[3:], x, use_reentrant=use_reentrant), inner, use_reentrant=False)

    assert_same(step(run, model), step(plain, plain))


@both_modes
def test_inserted_noise(use_reentrant):
    model = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm)
    plain = copy.deepcopy(model)
    ours = step(lambda x: checkpoint(model, x, use_reentrant=use_reentrant), model, tokens())
    assert_same(ours, step(plain, plain, tokens()))


def test_backward_passes_of_any_order_leave_the_next_batch_to_count():
    model = converted("gni")
    x = images().requires_grad_()
    (gradient,) = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert model[1].num_batches_tracked.item() == 4
    model(x)
    assert model[1].num_batches_tracked.item() == 5


def test_the_draws_of_an_explicit_generator_are_those_of_the_first_pass():
    steps = []
    for run in (lambda model: model, lambda model: lambda x: checkpoint(model, x, use_reentrant=False)):
        model = converted("gni", generator=torch.Generator().manual_seed(0))
        steps.append(step(run(model), model))
    assert torch.equal(steps[0]["y"], steps[1]["y"])
    assert_same(steps[0], steps[1])


def test_compiled_around_checkpoints():
    torch._dynamo.reset()
    model, plain = twins("gni", torch.float64)
    run = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend="aot_eager", fullgraph=True)
    x = images().double()
    assert_same(step(run, model, x), step(plain, plain, x), rtol=1e-9, atol=1e-9)
