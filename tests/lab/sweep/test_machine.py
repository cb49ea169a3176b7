import sys

import pytest

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.runners import Place
from ghostnoise.lab.sweep import machine


def test_without_ray_its_runner_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"--runner ray: needs the package ray .*pip install 'ghostnoise\[ray\]'"):
        machine.make_runner("ray", Place(tmp_path), [], None, None)
