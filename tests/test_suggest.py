import pytest

from ghostnoise.suggest import did_you_mean


@pytest.mark.parametrize(
    ("word", "expected"),
    [("gini", "; did you mean 'gni'?"), ("GNI", "; did you mean 'gni'?"), ("zzz", ""), (3, ""), ("", "")],
)
def test_the_nearest_name(word, expected):
    assert did_you_mean(word, ["gni", "gbn", "xbn"]) == expected


def test_any_iterable():
    assert did_you_mean("ghost_siz", iter(["ghost_size", "generator"])) == "; did you mean 'ghost_size'?"
