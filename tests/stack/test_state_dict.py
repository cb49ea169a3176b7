"""Train, save, load, evaluate: converted and plain networks read each other's files."""

import io

import pytest
import torch

from support.converted import METHODS, PLAIN_AT_INFERENCE, assert_same, converted, step
from support.models import convolutional, images, trained


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for seed in range(3):
        optimizer.zero_grad()
        step(model, model, seed=seed)
        optimizer.step()
    return through_a_file(model.state_dict())


@pytest.mark.parametrize("method", METHODS)
def test_trained_with_a_method_and_deployed_plain(method):
    model = converted(method)
    plain = convolutional()
    plain.load_state_dict(train(model), strict=True)
    same = torch.equal(model.eval()(images()), plain.eval()(images()))
    assert same == (method in PLAIN_AT_INFERENCE)


@pytest.mark.parametrize("method", METHODS)
def test_trained_plain_and_continued_with_a_method(method):
    plain, model = trained(), converted(method)
    model.load_state_dict(train(plain), strict=True)
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    same = torch.equal(model.eval()(images()), plain.eval()(images()))
    assert same == (method in PLAIN_AT_INFERENCE)
    train(model.train())
    assert model[1].num_batches_tracked.item() == 9
