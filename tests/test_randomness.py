"""Draws from a seed."""

import pytest
import torch
from scipy import stats
from torch.library import opcheck

import ghostnoise
from ghostnoise import randomness
from ghostnoise.randomness import draw_rows, draw_seed, philox_normals


def test_philox_is_the_published_generator():
    """The words of counter (0, 0, 0, 0) and key 0 in the known answers of Salmon et al."""
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(word) for word in randomness._philox(torch.tensor([0]), range(1), 1)] == words


def test_a_seed_comes_from_the_generator():
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    first, second = (draw_seed(torch.device("cpu"), generator) for generator in generators)
    assert first.shape == (1,)
    assert first.dtype == torch.int64
    assert torch.equal(first, second)
    assert not torch.equal(first, draw_seed(torch.device("cpu"), generators[0]))


def test_normals_are_normal_and_independent():
    """Of each other, of their neighbours, and of the same place with another seed, at a level of 1e-6."""
    seeds = [torch.tensor([seed]) for seed in (1, 2**62 + 1)]
    made = [torch.stack(philox_normals(seed, range(200), 300, torch.float64)) for seed in seeds]
    for each in made:
        for numbers in each:
            assert stats.kstest(numbers.flatten(), stats.norm.cdf).pvalue > 1e-6
    z = made[0]
    pairs = [(z[i], z[j]) for i in range(4) for j in range(i)]
    pairs += [(z[:, 1:], z[:, :-1]), (z[:, :, 1:], z[:, :, :-1]), tuple(made)]
    for first, second in pairs:
        for power in (1, 2):  # also whether their sizes are related
            found = stats.pearsonr(first.flatten() ** power, second.flatten() ** power)
            assert found.pvalue > 1e-6


def test_normals_are_a_function_of_the_seed_and_the_place():
    seed = torch.tensor([2**63 - 2])
    whole = philox_normals(seed, range(7), 5, torch.float64)
    part = philox_normals(seed, range(3, 6), 5, torch.float64)
    for ours, theirs in zip(part, whole, strict=True):
        assert torch.equal(ours, theirs[3:6])


def test_the_op_that_draws_rows():
    # Its results differ from call to call, so only what does not depend on them can be compared.
    op, place = torch.ops.ghostnoise.draw_rows.default, torch.empty(0)
    opcheck(op, (place, 7, 3, 5), test_utils=("test_schema", "test_faketensor"))
    drawn = op(place, 7, 300, 50)
    assert drawn.shape == (300, 50)
    assert stats.chisquare(torch.bincount(drawn.flatten(), minlength=7)).pvalue > 1e-6


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_draws_what_eager_code_draws(dynamic, backend):
    """Two draws with the same arguments are different, and the order is that of the calls."""
    torch._dynamo.reset()

    def draw(x):
        first, second = (draw_rows(x.shape[0], 2 * x.shape[0], 3, x.device, None) for _ in range(2))
        return x[first].sum(1) + 10 * x[second].sum(1)

    compiled = torch.compile(draw, fullgraph=True, dynamic=dynamic, backend=backend)
    for rows in (5, 8):
        for requires_grad in (False, True):
            x = torch.arange(rows, dtype=torch.float64).requires_grad_(requires_grad)
            torch.manual_seed(rows)
            expected = draw(x)
            torch.manual_seed(rows)
            assert torch.equal(compiled(x), expected)


def test_the_backward_pass_of_compiled_noise_does_not_draw_again():
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, dy = torch.randn(16, 4, 3, 3, dtype=torch.float64), torch.randn(16, 4, 3, 3, dtype=torch.float64)
    layer = ghostnoise.GhostNoiseBatchNorm2d(4, ghost_size=4, dtype=torch.float64)
    results = []
    for model in (layer, torch.compile(layer, fullgraph=True)):
        layer.zero_grad()
        given = x.clone().requires_grad_()
        torch.manual_seed(1)
        model(given).backward(dy)
        results.append([given.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=1e-10)
