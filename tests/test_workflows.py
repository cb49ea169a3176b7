"""The workflows for GitHub, which are not run here."""

import json
import re
from pathlib import Path

import check_jsonschema
import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
SCHEMA = Path(check_jsonschema.__file__).parent / "builtin_schemas/vendor/github-workflows.json"


def load(path):
    """Return a workflow; YAML 1.1 reads the key `on` as True."""
    return {"on" if key is True else key: value for key, value in yaml.safe_load(path.read_text()).items()}


def errors(workflow):
    return [error.message for error in jsonschema.Draft7Validator(json.loads(SCHEMA.read_text())).iter_errors(workflow)]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_it_fits_the_schema_of_github(path):
    assert errors(load(path)) == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_it_says_that_it_has_not_run_and_has_limits(path):
    assert path.read_text().startswith("# This workflow has not been run yet")
    assert load(path)["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in load(path)["jobs"].values())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_its_make_targets_exist(path):
    defined = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"run: make ([\w-]+)", path.read_text())) <= defined


def test_the_schema_finds_mistakes():
    workflow = load(WORKFLOWS[0])
    job = next(iter(workflow["jobs"].values()))
    del job["runs-on"]
    assert errors(workflow)


def test_a_release_has_a_package_for_every_platform_and_is_published_last():
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "tests"]
    jobs = load(WORKFLOWS[1])["jobs"]
    platforms = [each["platform"] for each in jobs["wheel"]["strategy"]["matrix"]["include"]]
    assert platforms == ["linux-x86_64", "linux-aarch64", "macos-arm64"]
    assert {"GHOSTNOISE_NO_NATIVE": "1"} in [step.get("env") for step in jobs["any"]["steps"]]
    publish = jobs["publish"]
    assert set(publish["needs"]) == jobs.keys() - {"publish"}
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert publish["permissions"] == {"id-token": "write"}  # a trusted publisher has no password
    uploaded = [
        step["with"]["name"] for job in jobs.values() for step in job["steps"] if "upload" in step.get("uses", "")
    ]
    assert all(name.startswith("wheel-") for name in uploaded)
    assert publish["steps"][0]["with"]["pattern"] == "wheel-*"
