"""Random input: every outcome is a run, or clear lines and the exit code 2; never a traceback or the exit code 70."""

import json
import os
import random
import shutil
from dataclasses import replace

import pytest

from ghostnoise import cli
from ghostnoise.lab.config import overrides as settings
from ghostnoise.lab.config import recipe
from ghostnoise.lab.events import Ended
from support.records import experiment_with_runs

pytestmark = pytest.mark.slow

VALUES = [
    "0", "1", "-1", "16", "0.5", "1e-3", "1e999", "nan", "inf", "-0.0", "true", "false", "unset", "", " ", "gni", "bn",
    "xbn", "none", "digits", "mnist1d", "sgd", "adamw", "cpu", "bf16", "test", "run", "[]", "[1, 2]", "[[[[1]]]]", "{}",
    "{a = 1}", "'text'", '"', "'", "[", "\x1b[31m", "\n", "\x00", "\udcff", "a=b", "9" * 30, "9" * 400, "9" * 5000,
    "0x" + "f" * 400, "[" * 3000, "2020-01-01", "1979-05-27T07:32:00Z", "../../x", "timm:nothing", "[bold]x[/bold]",
    "1_000", "0o7", ".5", "5.", "+3", "[0.9, 0.999]", "[0.9]", "1/N^2", "\u202e", "x" * 20_000, "ü", "💥",
]  # fmt: skip
KEYS = [
    "",
    ".",
    "..",
    "model",
    "train.",
    ".epochs",
    "a.b.c",
    "seed",
    "train.smoke",
    "\x1b",
    "norm.\n",
    "grid.seeds",
    "x" * 5000,
]


def outcome(words, capsys):
    """Call the command line, check that it ends properly, and return the exit code."""
    try:
        code = cli.main(words)
    except SystemExit as end:
        code = end.code
    _, printed = capsys.readouterr()
    assert code in (0, 2), (words, printed)
    if code == 2:
        lines = printed.splitlines()
        assert lines, words
        assert lines[0].startswith("ghostnoise"), (words, printed)
        assert all(line.isprintable() for line in lines), (words, printed)
        assert len(printed) < 20_000, words
    assert "Traceback" not in printed
    return code


@pytest.fixture
def untrained(monkeypatch, tmp_path):
    """Load and check recipes as training does, but do not train them."""

    def train(run, options):
        resolved = recipe.resolve(run.settings, device="cpu", processes=1)
        recipe.check(resolved)
        yield Ended("finished", replace(run, given=resolved, status="finished"))

    monkeypatch.setattr("ghostnoise.lab.train.train", train)


def test_2000_random_overrides(untrained, capsys):
    chance, keys, codes = random.Random(16), settings.keys(), []
    for _ in range(2000):
        count = chance.choice([1, 1, 1, 2, 3])
        words = [
            f"{chance.choice(keys if chance.random() < 0.9 else KEYS)}={value}"
            for value in chance.choices(VALUES, k=count)
        ]
        words = [word for word in words if not word.startswith("-")]
        codes.append(outcome(["train", "digits", *words], capsys))
    assert 20 < codes.count(0) < 1980


def test_some_random_overrides_are_trained(capsys, tmp_path):
    chance, keys = random.Random(17), settings.keys()
    codes = []
    for at in range(100):
        words = [f"{chance.choice(keys)}={chance.choice(VALUES)}"]
        codes.append(
            outcome(["train", "digits", *words, "--smoke", "--runs", str(tmp_path / str(at)), "--quiet"], capsys)
        )
    assert codes.count(0) > 2


def damage(folder, chance):
    """Damage a run folder in a random way."""
    path = folder / chance.choice(["settings.json", "result.json", "environment.json", "metrics.jsonl", "failure.json"])
    content = path.read_bytes() if path.exists() else b"{}"
    kind = chance.randrange(10)
    if kind == 0 and content:
        at = chance.randrange(len(content))
        path.write_bytes(content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :])
    elif kind == 1:
        path.write_bytes(content[: chance.randrange(len(content) + 1)])
    elif kind == 2:
        path.write_bytes(chance.randbytes(chance.randrange(200)))
    elif kind in (3, 4, 5) and path.name != "metrics.jsonl":
        tree = json.loads(content)
        tree[chance.choice([*tree, "more"])] = "HERE"
        path.write_text(json.dumps(tree).replace('"HERE"', chance.choice(JSON)))
    elif kind == 6:
        path.write_bytes(content * 2)
    else:
        path.unlink(missing_ok=True)
        make = chance.choice(
            [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path), lambda path: path.symlink_to("/dev/zero")]
        )
        make(path)


JSON = [
    "9" * 400, "9" * 5000, "-1", "1e999", "NaN", "null", "true", '"90"', '"\\u001b[31m"', "[]", "[1]", "{}", "0.5",
    "[" * 10**5, '{"a":' * 500 + "1" + "}" * 500, '"[bold]x"', '"' + "a" * 10**5 + '"', '"\\ud800"', "",
    "1e400", "-0.0",
]  # fmt: skip


def test_500_corrupted_run_folders(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    experiment_with_runs(tmp_path)
    whole, runs, chance = tmp_path / "runs", tmp_path / "copy", random.Random(18)
    for at in range(500):
        shutil.copytree(whole, runs)
        names = sorted(path.name for path in (runs / "tiny").iterdir())
        hit = chance.choice(names)
        damage(runs / "tiny" / hit, chance)
        assert cli.main(["runs", "--runs", str(runs)]) == 0
        printed = capsys.readouterr().out
        assert all(name in printed for name in names)
        assert printed.count("finished") >= len(names) - 1
        assert printed.replace("\n", "").isprintable()
        if "is damaged (" in printed:
            assert printed.count("`ghostnoise runs remove ") == 1
        assert outcome(["runs", "show", hit, "--runs", str(runs)], capsys) == 0
        if at % 50 == 0:
            words = ["report", str(tmp_path / "tiny.toml"), "--runs", str(runs), "--out", str(tmp_path / "out")]
            assert outcome(words, capsys) == 0
        shutil.rmtree(runs)


ODD = [
    "a = " + "[" * 5000, "a" + ".a" * 5000 + " = 1", "x = " + "9" * 5000, "[model]", "[[model]]",
    "model = 3", "grid = []",
    "[grid]\nseeds = []", '[grid]\nseeds = ["a"]', "[grid]\nseeds = [0]\n[[grid.methods]]\nlabel = 3", "report = 1",
    "[variants]\nreleased = 1", 'seed = "\\u001b"', "seed = -1", "\x00", "\ufeff", "a = 1979-05-27",
    "[grid]\naxes.norm.ghost_size = 3\nseeds = [0]", "[select]\naxes = 1", '[report]\nform = "x"', '"" = 1',
    "'a b' = 1",
]  # fmt: skip


def test_100_odd_recipes(untrained, tmp_path, capsys):
    chance = random.Random(19)
    names = ["digits", "demo", "fig3-gni", "mnist1d-fig3"]
    for at in range(100):
        content = bytearray(recipe.read(chance.choice(names)).encode())
        kind = chance.randrange(5)
        if kind == 0:
            for _ in range(chance.randrange(1, 5)):
                content[chance.randrange(len(content))] = chance.randrange(256)
        elif kind == 1:
            first = chance.randrange(len(content))
            del content[first : first + chance.randrange(1, 200)]
        elif kind == 2:
            lines = content.split(b"\n")
            chance.shuffle(lines)
            content = b"\n".join(lines)
        elif kind == 3:
            content += b"\n" + chance.choice(ODD).encode()
        else:
            content = bytearray(chance.choice(ODD).encode()) + b"\n" + content
        name = chance.choice(["odd", "...", "", "a\x1b", "a\udcff", "[red]", " ", "a:b", "x" * 250, "ü"])
        path = os.path.join(tmp_path, f"{name}.toml")
        try:
            with open(path, "wb") as file:
                file.write(content)
        except OSError:
            pass  # a name that this file system refuses is a recipe that does not exist
        for words in (["train", path], ["sweep", path, "--dry-run"], ["recipes", path]):
            outcome([*words, "--runs", str(tmp_path / "runs")] if words[0] != "recipes" else words, capsys)
        assert sorted(each.name for each in tmp_path.iterdir() if each.is_dir()) in ([], ["runs"]), at
