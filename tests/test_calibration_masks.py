"""`calibrate` of padded batches gives what the same samples give without padding, by naive float64 loops."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ghostnoise
from ghostnoise.calibration import ALPHAS
from support import ragged
from support.calibrating import METHODS, fails
from support.ranks import launch, values

LENGTH = 7
LENGTHS = [[5, 2, 7, 0, 3, 1], [7, 7], [0, 4, 0, 6, 6, 1, 2, 5]]


def plain(seed=0):
    torch.manual_seed(seed)
    layers = nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.ReLU(), nn.Dropout(0.5), nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4)
    return nn.Sequential(*layers).double()


def converted(method="bn", seed=0, **options):
    return ghostnoise.convert(plain(seed), method, **METHODS[method] | options)


def padded(lengths=LENGTHS, length=LENGTH):
    """Return batches (x, mask) with NaN in the padding."""
    masks = [ragged.lengths_mask(each, length) for each in lengths]
    inputs = [values(len(mask), 2, length, seed=at) for at, mask in enumerate(masks)]
    return [(x.where(mask.unsqueeze(1), torch.nan), mask) for x, mask in zip(inputs, masks, strict=True)]


def forward(model, batch):
    with ghostnoise.masked(batch[1]):
        return model(batch[0])


def hidden(model, batches):
    """Return the samples (C, n) of all batches as they reach the two batch norms, without padding."""

    def convolved(layer, samples):
        return [layer.weight[:, :, 0] @ sample + layer.bias[:, None] for sample in samples]

    first, second = [], []
    for x, mask in batches:
        samples = convolved(model[0], ragged.unpad(x, mask))
        first += samples
        normalized = ragged.batch_norm(samples, model[1].weight, model[1].bias)
        second += convolved(model[4], [sample.relu() for sample in normalized])
    return first, second


def assert_statistics(layer, samples):
    mean, var = ragged.statistics(samples)
    count = sum(sample.shape[1] for sample in samples)
    torch.testing.assert_close(layer.running_mean, mean, rtol=0, atol=1e-10)
    torch.testing.assert_close(layer.running_var, var * count / (count - 1), rtol=1e-10, atol=0)


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, LENGTH), min_size=2, max_size=6), min_size=1, max_size=3))
def test_statistics_are_those_of_all_valid_positions(lengths):
    batches = padded([[2, *each] for each in lengths])
    model = converted()
    first, second = hidden(model, batches)
    found = ghostnoise.calibrate(model, batches, forward=forward)
    assert found == (("1", "5"), len(lengths), None, None)
    assert_statistics(model[1], first)
    assert_statistics(model[5], second)


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_every_method(method, noise):
    batches, model = padded([[7, 5, 2, 6, 3, 4, 0, 7], [2, 3, 4, 5]]), converted(method)
    first, second = hidden(model, batches)
    ghostnoise.calibrate(model, batches, noise=noise, forward=forward)
    assert_statistics(model[1], first)
    if not noise and method not in ("xbn", "brn"):  # BRN corrects towards its running statistics
        assert_statistics(model[5], second)


class Aware(nn.Module):
    """A model that gives its layers the mask, by a block or as an argument."""

    def __init__(self, model, how):
        super().__init__()
        self.model, self.how = model, how

    def forward(self, x, mask):
        if self.how == "block":
            with ghostnoise.masked(mask):
                return self.model(x)
        for layer in self.model:
            takes = isinstance(layer, nn.BatchNorm1d)
            x = layer(input=x, mask=mask) if takes and self.how == "keyword" else layer(x, *[mask] * takes)
        return x


@pytest.mark.parametrize("how", ["block", "argument", "keyword"])
def test_models_that_know_their_masks(how):
    batches, model = padded(), Aware(converted("gni"), how)
    first, second = hidden(model.model, batches)
    ghostnoise.calibrate(model, [{"x": x, "mask": mask} for x, mask in batches])
    assert_statistics(model.model[1], first)
    assert_statistics(model.model[5], second)


def test_a_block_around_calibrate():
    x, mask = padded()[0]
    model = converted()
    first, _ = hidden(model, [(x, mask)])
    with ghostnoise.masked(mask):
        ghostnoise.calibrate(model, [x])
    assert_statistics(model[1], first)


def test_images_tokens_and_inputs_without_positions():
    mask = torch.rand(6, 4, 3, generator=torch.Generator().manual_seed(0)) < 0.6
    x = values(6, 3, 4, 3)
    for images in (x, x.to(memory_format=torch.channels_last)):
        layer = ghostnoise.BatchNorm2d(3).double()
        ghostnoise.calibrate(layer, [(images, mask)], forward=forward)
        assert_statistics(layer, ragged.unpad(x, mask))
    flat, chosen = values(6, 3), torch.tensor([True, False, True, True, False, True])
    layer = ghostnoise.GhostBatchNorm1d(3, ghost_size=2).double()
    ghostnoise.calibrate(layer, [(flat, chosen)], forward=forward)
    assert_statistics(layer, [sample[:, None] for sample in flat[chosen]])
    noise, tokens = ghostnoise.GhostNoise(4, channel_dim=-1), values(6, LENGTH, 3)
    lengths = [5, 0, 7, 1, 2, 3]
    ghostnoise.calibrate(noise, [(tokens, ragged.lengths_mask(lengths, LENGTH))], keep=9, forward=forward)
    assert sorted(noise.kept.n.flatten().tolist()) == [1, 2, 3, 5, 7]


def test_masks_for_several_shapes():
    model, batches = plain(), padded()
    model[4] = nn.Conv1d(3, 4, 1, stride=2).double()
    model = ghostnoise.convert(model, "gbn", ghost_size=4)
    first, _ = hidden(model, batches)

    def both(model, batch):
        with ghostnoise.masked(batch[1], batch[1][:, ::2]):
            return model(batch[0])

    found = ghostnoise.calibrate(model, batches, forward=both)
    assert found.layers == ("1", "5")
    assert_statistics(model[1], first)
    fails(model, batches, r"'5', a GhostBatchNorm1d\(.*must have one for its positions, \(6, 4\)", forward=forward)


# Kept samples.


def test_kept_samples_have_the_moments_and_counts_of_their_valid_positions():
    batches, model = padded(), converted("gni")
    first, second = hidden(model, batches)
    ghostnoise.calibrate(model, batches, keep=100, forward=forward)
    present = [at for at, sample in enumerate(first) if sample.shape[1]]
    chosen = []
    for layer, samples in ((model[1], first), (model[5], second)):
        kept = layer.kept
        assert len(kept.n) == len(present)
        means = torch.stack([samples[at].mean(1) for at in present])
        at = (kept.mean[:, None] - means).abs().sum(2).argmin(1).tolist()
        assert sorted(at) == list(range(len(present)))
        for row, number in enumerate(at):
            sample = samples[present[number]]
            torch.testing.assert_close(kept.mean[row], sample.mean(1), rtol=0, atol=1e-10)
            torch.testing.assert_close(kept.var[row], sample.var(1, correction=0), rtol=0, atol=1e-10)
            assert kept.n[row] == sample.shape[1]
        chosen.append(at)
    assert chosen[0] == chosen[1]


def test_samples_without_valid_positions_take_no_room():
    batches, model = padded([[0, 0, 0, 0, 0, 0, 0, 5, 3]] * 10), converted("gni")
    ghostnoise.calibrate(model, batches, keep=12, forward=forward)
    assert set(model[1].kept.n.flatten().tolist()) == {3, 5}
    assert len(model[1].kept.n) == 12
    with ghostnoise.sampling(model.eval()):
        assert forward(model, batches[0]).isfinite().all()


# EvalNorm's weight.


class Head(nn.Module):
    """The mean over valid positions of an EvalNorm's output, as two logits."""

    def __init__(self):
        super().__init__()
        self.norm = ghostnoise.EvalNorm1d(2, ghost_size=4).double()

    def forward(self, x, mask):
        with ghostnoise.masked(mask):
            return self.norm(x).square().sum(2) / mask.sum(1, keepdim=True)


def test_the_weight_is_chosen_on_valid_positions():
    torch.manual_seed(0)
    model, train = Head(), padded([[5, 2, 7, 1, 3, 1], [7, 7]])
    validation = [((x, mask), torch.arange(len(x)) % 2) for x, mask in padded([[3, 4, 1, 7, 5], [2, 6, 2]])]

    def run(model, batch):
        return model(*(batch[0] if isinstance(batch[0], tuple) else batch))

    found = ghostnoise.calibrate(model, train, validation=validation, forward=run)
    samples = [sample for x, mask in train for sample in ragged.unpad(x, mask)]
    assert_statistics(model.norm, samples)
    running = model.norm.running_mean, model.norm.running_var
    for alpha in ALPHAS:
        total = 0.0
        for (x, mask), target in validation:
            normalized = ragged.eval_norm(ragged.unpad(x, mask), *running, alpha)
            logits = torch.stack([sample.square().mean(1) for sample in normalized])
            total += F.cross_entropy(logits, target, reduction="sum").item()
        assert math.isclose(found.losses[alpha], total / 8, rel_tol=1e-10)
    assert model.norm.alpha == found.alpha == min(found.losses, key=found.losses.get)


# What cannot be measured is an error, and nothing is changed.


def test_batch_norms_of_torch_are_refused_with_padding():
    model, batches = plain(), [(values(2, 2, LENGTH), ragged.lengths_mask([7, 4], LENGTH))]
    refused = (
        r"'1' \(BatchNorm1d\).* got a padded input of shape \(2, 3, 7\) .*: only layers .* convert the model first"
    )
    fails(model, batches, refused, forward=forward)
    other = [(x[:, :, :5], mask) for x, mask in batches]
    unknown = r"'1' \(BatchNorm1d\).* got an input of shape \(2, 3, 5\) inside of ghostnoise.masked, which"
    fails(model, other, unknown, forward=forward)
    full = [(x, torch.ones_like(mask)) for x, mask in batches]
    twin = copy.deepcopy(model)
    ghostnoise.calibrate(model, full, forward=forward)
    ghostnoise.calibrate(twin, [x for x, _ in full])
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_bad_masks_change_nothing():
    batches = padded()
    fails(converted(), [(x, mask.float()) for x, mask in batches], "mask of dtype torch.float32", forward=forward)
    fails(converted(), [(x, mask & False) for x, mask in batches], "False everywhere", forward=forward)
    aware = Aware(converted(), "argument")
    wrong = [{"x": x, "mask": mask[:, 1:]} for x, mask in batches]
    fails(aware, wrong, r"got a mask of shape \(6, 6\) for an input of shape \(6, 3, 7\)")


def test_values_that_are_not_finite_at_valid_positions():
    (x, mask), *rest = padded()
    x[0, 0, 0] = math.inf
    fails(converted(), [*rest, (x, mask)], r"batch 2 \(counted from 0\) reaches '1' .* not finite", forward=forward)


# Ranks.


def over_ranks(rank, count):
    batches, model = padded(), converted("gni", process_group="world", uneven=True)
    first, second = hidden(model, [tuple(torch.cat(parts) for parts in zip(*batches, strict=True))])
    x, mask = (torch.cat(parts) for parts in zip(*batches, strict=True))
    rows = slice(0, 10) if rank == 0 else slice(10, 16)
    own = [(x[rows], mask[rows])]
    ghostnoise.calibrate(model, own, keep=100, forward=forward, process_group="world")
    assert_statistics(model[1], first)
    assert_statistics(model[5], second)
    assert sorted(model[1].kept.n.flatten().tolist()) == sorted(n for each in LENGTHS for n in each if n)
    empty = converted("gbn", process_group="world", uneven=True)
    own = [(x[rows], mask[rows] if rank == 0 else mask[rows] & False)]
    first, second = hidden(empty, [(x[:10], mask[:10])])
    ghostnoise.calibrate(empty, own, forward=forward, process_group="world")
    assert_statistics(empty[1], first)
    assert_statistics(empty[5], second)


def test_ranks_get_the_statistics_of_all_valid_positions(tmp_path):
    launch(2, over_ranks, tmp_path)
