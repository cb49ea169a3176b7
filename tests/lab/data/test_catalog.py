import math
import re

import pytest

from ghostnoise.lab.data import catalog
from ghostnoise.lab.data.catalog import CATALOG
from ghostnoise.lab.data.files import read_digits
from ghostnoise.lab.errors import UserError

LAYOUTS = [(entry, entry.layout) for entry in CATALOG.values() if entry.layout]


def test_the_sets_are_those_of_the_settings():
    from ghostnoise.lab.config import own
    from ghostnoise.lab.config.schema import DataSettings

    assert {*CATALOG, "imagefolder"} == set(DataSettings.kinds()) - {own.NAME}


@pytest.mark.parametrize(("entry", "layout"), LAYOUTS, ids=lambda each: getattr(each, "name", None) or each.folders[0])
def test_sizes_of_files_follow_from_shapes_and_counts(entry, layout):
    pixels = math.prod(entry.shape)
    for part, files in (("train", layout.train), ("test", layout.test)):
        count = entry.size(part)
        if layout.archive is None:
            assert [file.size for file in files] == [16 + count * pixels, 8 + count]
        else:  # names of files and opcodes beside the pixels
            assert 1 < sum(file.size for file in files) / (count * pixels) < 1.02
    assert len(entry.mean) == len(entry.std) == entry.shape[0]


def test_every_file_has_a_checksum_of_its_own():
    files = [file for _, layout in LAYOUTS for file in (*layout.train, *layout.test, *layout.downloads)]
    assert all(re.fullmatch("[0-9a-f]{32}", file.md5) for file in files)
    assert len({file.md5 for file in files}) == len(files)


def test_downloads_are_an_archive_or_all_files():
    for _, layout in LAYOUTS:
        if layout.archive:
            assert layout.downloads == (layout.archive,)
        else:
            assert [file.name for file in layout.downloads] == [
                f"{file.name}.gz" for file in layout.files(("train", "test"))
            ]
        assert all(address.startswith("https://") and address.endswith("/") for address in layout.addresses)


def test_mean_and_std_of_the_digits_are_those_of_the_training_images():
    entry, pixels = CATALOG["digits"], read_digits("train").pixels / 255
    assert entry.mean == (round(pixels.mean(), 4),)
    assert entry.std == (round(pixels.std(), 4),)


def test_an_unknown_name_raises_with_the_known_names():
    with pytest.raises(
        UserError,
        match=r"CIFAR10: unknown data set; must be one of mnist1d, digits, .*imagefolder; did you mean cifar10\?",
    ):
        catalog.find("CIFAR10")
