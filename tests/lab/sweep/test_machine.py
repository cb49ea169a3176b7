import sys

import pytest

from ghostnoise.lab.engines.job import Place
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.sweep import machine


def test_without_ray_its_engine_says_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"--engine ray: needs the package ray .*pip install 'ghostnoise\[ray\]'"):
        machine.engine("ray", Place(tmp_path), [], None, None)
