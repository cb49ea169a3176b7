"""Limits on names, files and values."""

import os

import pytest

from ghostnoise.lab.config import recipe
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.limits import checked_name, parse_toml, read_bytes


@pytest.mark.parametrize("name", ["digits", "fig3-gni", "a.b", "ü", "with space", "x" * 200])
def test_names_of_folders(name):
    assert checked_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "a/b", "a\\b", "c:d", "a\nb", "a\x1b[31m", "a\x00", "a\udcff", "x" * 201, None, 3],
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="must be the name of a recipe"):
        checked_name(name)


@pytest.mark.parametrize(
    "name", ["...toml", "./...toml", ".toml", "a\x1b.toml", "a:b.toml", "sub/..", f"{'x' * 300}.toml"]
)
def test_a_recipe_whose_runs_could_have_no_folder_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "...toml").write_text(recipe.read("digits"))
    with pytest.raises(UserError, match=r"its runs would have the folder .*; rename the recipe"):
        recipe.load(name)


def test_a_variant_cannot_leave_the_folder_either(tmp_path):
    path = tmp_path / "odd.toml"
    path.write_text(recipe.read("digits") + '\n[variants."../x"]\nset.seed = 1\n')
    with pytest.raises(UserError, match=r"its runs would have the folder 'odd-../x'"):
        recipe.load(str(path), variant="../x")


@pytest.mark.parametrize("kind", ["pipe", "folder", "large", "not UTF-8", "null"])
def test_a_recipe_is_a_text_file_of_a_moderate_size(kind, tmp_path):
    path = tmp_path / "odd.toml"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "large":
            path.write_text("#" * 2**19)
        case "not UTF-8":
            path.write_bytes(b"# \xff")
    given = f"{path}\0/x" if kind == "null" else str(path)
    with pytest.raises(UserError, match=r"cannot be read \(.*\); give the path|is not UTF-8"):
        recipe.load(given)


TOO_MUCH = {
    "deep": "[" * 10**4 + "]" * 10**4, "nested": "[" * 20 + "]" * 20, "digits": "9" * 400, "more digits": "9" * 5000,
    "hexadecimal": "0x" + "f" * 1000, "text": "'" + "a" * 2000 + "'", "control": '"\\u001b[31m"',
}  # fmt: skip


@pytest.mark.parametrize("value", TOO_MUCH.values(), ids=TOO_MUCH)
def test_values_have_limits_in_recipes_and_overrides(value, tmp_path):
    with pytest.raises(ValueError, match=r"nested too deeply|digits|out of range|a text must"):
        parse_toml(f"seed = {value}")
    path = tmp_path / "odd.toml"
    path.write_text(recipe.read("digits").replace("\n[model]", f"\nseed = {value}\n[model]", 1))
    for given, overrides in ((str(path), []), ("digits", [f"seed={value}"])):
        with pytest.raises(UserError) as error:
            recipe.load(given, overrides)
        assert len(str(error.value)) < 1000
        assert str(error.value).isprintable()


def test_an_override_has_a_limit():
    with pytest.raises(UserError, match=r"must have at most 10,000 characters; shorten it"):
        recipe.load("digits", [f"model.name={'a' * 10_001}"])


def test_dotted_keys_cannot_nest_deeply():
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_toml(f"{'.'.join('a' * 5000)} = 1")


def test_links_are_read_only_if_asked(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link", follow=True) == b"content"
    with pytest.raises(ValueError, match="a symbolic link instead of a file"):
        read_bytes(tmp_path / "link")
    with pytest.raises(ValueError, match="7 bytes: must have at most 6"):
        read_bytes(tmp_path / "file", 6)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_no_descriptor_stays_open(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for name, reason in ((".", "a folder instead of a file"), ("pipe", "not a regular file"), ("file", "7 bytes")):
        with pytest.raises(ValueError, match=reason):
            read_bytes(tmp_path / name, 6)
    assert len(os.listdir("/proc/self/fd")) == before
