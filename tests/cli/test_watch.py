"""`ghostnoise watch` as a user calls it."""

import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from ghostnoise import cli
from support.run_folders import experiment, fill

GOOD = {"BN": {0: 90.0, 1: 90.4, 2: 90.2}}


@pytest.fixture
def there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "runs", experiment(tmp_path), GOOD)
    return tmp_path


@pytest.mark.usefixtures("there")
def test_a_mistake_is_one_line_and_exit_code_2(capsys):
    assert cli.main(["watch", "tini"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "recipe 'tini'" in err
    assert err.count("\n") == 1


def test_a_bad_port_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["watch", "x", "--port", "65536"])
    assert ended.value.code == 2
    assert "must be an integer from 0 to 65535" in capsys.readouterr().err


def test_watch_serves_until_it_is_interrupted(there):
    command = [sys.executable, "-m", "ghostnoise", "watch", "tiny.toml", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=there) as process:
        try:
            line = process.stdout.readline()
            url = re.match(r"http://127\.0\.0\.1:\d+/", line)[0]
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url + "table.md", timeout=30) as got:
                assert "90.20 ± 0.20 (3)" in got.read().decode()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    assert out.endswith("stopped serving; runs in progress are not affected\n")
    assert err == "ghostnoise watch: loading PyTorch, which takes a few seconds, and longer the first time ...\n"
    assert not (there / "out").exists()
