import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise.lab.data.augment import Normalization, Pixels, draw_moves

CPU = torch.device("cpu")
shapes = st.tuples(st.sampled_from([1, 3]), st.integers(1, 6), st.integers(1, 6))


def random_pixels(count, shape, seed=0):
    return torch.randint(0, 256, (count, *shape), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


@given(shapes, st.integers(0, 4), st.booleans(), st.integers(0, 99))
def test_moves_are_those_of_a_loop_over_images(shape, padding, channels_last, seed):
    images = random_pixels(7, shape, seed)
    rows = torch.tensor([3, 0, 6, 3, 5])
    moves = draw_moves(5, padding, seed, epoch=1, step=2)
    found = Pixels(images, CPU, channels_last, padding).moved(rows, moves)
    assert found.is_contiguous()
    found = found.permute(0, 3, 1, 2) if channels_last else found
    for image, row, top, left, flip in zip(found, rows, *moves, strict=True):
        padded = F.pad(images[row], (padding,) * 4)
        naive = padded[:, top : top + shape[1], left : left + shape[2]]
        assert torch.equal(image, naive.flip(-1) if flip else naive)


@given(shapes, st.integers(0, 3), st.booleans())
def test_plain_images_are_the_given_ones(shape, padding, channels_last):
    images = random_pixels(6, shape)
    pixels, rows = Pixels(images, CPU, channels_last, padding), torch.tensor([5, 0, 5])
    order = (0, 3, 1, 2) if channels_last else (0, 1, 2, 3)
    assert torch.equal(pixels.plain(rows).permute(order), images[rows])
    assert torch.equal(pixels.plain(slice(1, 4)).permute(order), images[1:4])


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_moves_are_uniform(padding):
    """n = 20,000 draws of each: every count within 4.5 standard deviations, which 25 counts exceed once in 5,000."""
    n, places = 20_000, 2 * padding + 1
    top, left, flip = draw_moves(n, padding, seed=3, epoch=0, step=0)
    for values, kinds in ((top, places), (left, places), (flip, 2), (top * places + left, places**2)):
        counts = torch.bincount(values, minlength=kinds).double()
        assert len(counts) == kinds
        assert (counts - n / kinds).abs().max() <= 4.5 * (n / kinds * (1 - 1 / kinds)) ** 0.5
    if padding:
        pairs = torch.bincount(flip * places + left, minlength=2 * places).double()  # a flip tells nothing of a crop
        share = 1 / (2 * places)
        assert (pairs - n * share).abs().max() < 4.5 * (n * share * (1 - share)) ** 0.5


@given(shapes, st.booleans(), st.integers(0, 99))
def test_normalization_against_float64(shape, channels_last, seed):
    """Error of each: two constants and two operations, rounded once each, of values up to |shift| + 255."""
    images = random_pixels(4, shape, seed)
    mean, std = (0.4914, 0.4822, 0.4465)[: shape[0]], (0.2023, 0.1994, 0.2010)[: shape[0]]
    normalize = Normalization(shape, mean, std, CPU, channels_last)
    found = normalize(images.permute(0, 2, 3, 1).contiguous() if channels_last else images)
    exact = (images.numpy() / 255 - np.reshape(mean, (-1, 1, 1))) / np.reshape(std, (-1, 1, 1))
    assert found.dtype == torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    unit = 2.0**-24
    bound = unit * (np.reshape(mean, (-1, 1, 1)) / np.reshape(std, (-1, 1, 1)) + 4 * np.abs(exact))
    assert np.all(np.abs(found.double().numpy() - exact) <= bound)


def test_a_pixel_does_not_depend_on_its_place():
    """To the bit: every value in every place, in tensors of any length."""
    values = torch.arange(256, dtype=torch.uint8).reshape(256, 1, 1, 1)
    expected = Normalization((1, 1, 1), (0.1307,), (0.3081,), CPU)(values).flatten()
    for width in (3, 17, 64):
        normalize = Normalization((1, 1, width), (0.1307,), (0.3081,), CPU)
        found = normalize(values.expand(256, 1, 1, width).contiguous())
        assert torch.equal(found, expected[:, None, None, None].expand_as(found))


def test_the_stored_images_are_left_alone():
    images = random_pixels(5, (3, 4, 4))
    before = images.clone()
    pixels, normalize = Pixels(images, CPU), Normalization((3, 4, 4), (0.5,) * 3, (0.2,) * 3, CPU)
    first = normalize(pixels.plain(slice(0, 5)))
    assert torch.equal(normalize(pixels.plain(slice(0, 5))), first)
    assert torch.equal(images, before)
