import pytest

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.sweep import seeds


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", [3]), ("0..4", [0, 1, 2, 3, 4]), ("0,2,5", [0, 2, 5]), ("7, 1..3,2", [7, 1, 2, 3]), ("2..2", [2])],
)
def test_seeds_are_read(text, expected):
    assert seeds.read(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1..", "..3", "4..1", "-1", "1,,2", "0..100000", "0.5", "9" * 30])
def test_what_are_no_seeds_is_refused_in_a_line(text):
    with pytest.raises(UserError, match="--seeds") as error:
        seeds.read(text)
    assert "\n" not in str(error.value)
