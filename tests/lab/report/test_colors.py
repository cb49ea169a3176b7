"""Colours: one for each method, distinguishable with every form of colour vision, and visible on both backgrounds."""

import itertools

import numpy as np
import pytest

from ghostnoise.lab.report import colors
from ghostnoise.methods import registry

# Machado, Oliveira and Fernandes (2009), severity 1, in linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
LEAST_DISTANCE = 14  # in CIE L*a*b*, where 2.3 is just noticeable


def linear(code):
    values = np.array([int(code[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    x, y, z = (TO_XYZ @ rgb) / [0.9505, 1, 1.089]
    f = [np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z)]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(code, ground):
    first, second = sorted((TO_XYZ[1] @ linear(each) + 0.05 for each in (code, ground)), reverse=True)
    return first / second


def all_colors():
    return list(dict.fromkeys([*colors.METHODS.values(), *colors.OTHERS]))


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize("vision", VISION)
def test_methods_are_distinguishable_with_every_colour_vision(vision, theme):
    seen = {color[theme]: lab(np.clip(VISION[vision] @ linear(color[theme]), 0, 1)) for color in all_colors()}
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) >= LEAST_DISTANCE, (one, other)


@pytest.mark.parametrize("theme", [0, 1])
def test_colours_are_visible_on_their_background(theme):
    for color in [*all_colors(), *colors.ramp(20)]:
        assert contrast(color[theme], colors.GROUNDS[theme]) >= 3, color


def test_every_method_of_the_registry_has_a_colour_of_its_own():
    known = [colors.METHODS[name] for name in registry.specs()]
    assert len(set(known)) == len(known)


def test_a_method_that_is_not_listed_keeps_one_colour():
    assert colors.of("new") in colors.OTHERS
    assert colors.of("new") == colors.of("new")


def test_layers_become_lighter_from_the_first_to_the_last():
    for theme in (0, 1):
        light = [lab(linear(color[theme]))[0] for color in colors.ramp(9)]
        assert light == sorted(light)
    assert len(colors.ramp(1)) == 1
