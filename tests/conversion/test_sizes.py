import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ghostnoise
from models import convolutional, state, transformer


def sizes(ghost_size, names=("a", "b1", "b2"), method="gni"):
    model = nn.Module()
    for name in names:
        model.add_module(name, nn.BatchNorm1d(2))
    ghostnoise.convert(model, method, ghost_size)
    return [getattr(model, name).ghost_size for name in names]


def test_the_first_pattern_that_matches_counts():
    assert sizes({"b1": 4, "b*": 8, "*": 16}) == [16, 4, 8]
    assert sizes({"*": 16, "b*": 8}) == [16, 16, 16]
    assert sizes({"a": None, "b[12]": 8}) == [None, 8, 8]
    assert sizes({"?": 3, "b?": 5}, method="xbn") == [3, 5, 5]


def test_patterns_for_inserted_noise():
    model = ghostnoise.convert(transformer(), "gni", {"0": 4, "*": 8}, after=nn.LayerNorm)
    assert [row.ghost_size for row in ghostnoise.summary(model)] == [4, 8]


def test_any_name_of_a_shared_layer_matches():
    norm = nn.BatchNorm1d(2)
    model = ghostnoise.convert(nn.Sequential(norm, norm), "gni", {"1": 4})
    assert model[0].ghost_size == 4


@pytest.mark.parametrize(
    ("ghost_size", "message"),
    [
        (
            {"a": 4},
            r"ghost_size has no pattern for 'b1' \(BatchNorm1d\), 'b2' .*: every layer .*; add '\*' as the last",
        ),
        ({"*": 4, "c*": 8, "d": 2}, r"ghost_size has 'c\*', 'd', which no layer to convert matches: they are 'a'"),
        ({"*": "4"}, "ghost_size='4': must be an integer"),
        ({"*": 4, 3: 4}, "ghost_size has the key 3: must be a pattern of module names"),
        ({}, "ghost_size has no pattern for 'a'"),
        ([4], r"ghost_size=\[4\]: must be an integer"),
        (4.0, "ghost_size=4.0: must be an integer"),
    ],
)
def test_sizes_that_are_none(ghost_size, message):
    with pytest.raises(ValueError, match=message):
        sizes(ghost_size)


def test_a_mapping_for_a_method_without_ghosts():
    with pytest.raises(ValueError, match="'bn' normalizes the whole batch"):
        sizes({"*": 4}, method="bn")


def test_the_last_layer_fails_and_the_first_is_as_it_was():
    model = convolutional()
    before = state(model)
    with pytest.raises(ValueError, match="ghost_size=0"):
        ghostnoise.convert(model, "gni", {"1": 4, "*": 0})
    assert state(model) == before


@given(st.lists(st.sampled_from(["a", "b1", "b2", "b*", "*", "?"]), unique=True))
def test_every_layer_has_the_size_of_its_first_pattern(patterns):
    fitting = {"a": {"a", "*", "?"}, "b1": {"b1", "b*", "*"}, "b2": {"b2", "b*", "*"}}
    first = [next((pattern for pattern in patterns if pattern in fits), None) for fits in fitting.values()]
    mapping = {pattern: 2 + number for number, pattern in enumerate(patterns)}
    if None in first:
        with pytest.raises(ValueError, match="no pattern for"):
            sizes(mapping)
    else:
        assert sizes(mapping) == [mapping[pattern] for pattern in first]
