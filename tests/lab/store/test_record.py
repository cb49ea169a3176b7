"""Records are untrusted: every malformed one is refused with a reason of one line."""

import json
import string
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ghostnoise.lab.store import record, scan
from ghostnoise.lab.store.folder import history, whole
from support.records import experiment_with_runs, finished, on_cpu
from support.run_folders import experiment, points

RESULTS = Path(__file__).parents[3] / "results"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The record of a run, as a tree."""
    folder = tmp_path_factory.mktemp("runs")
    path = finished(folder, "tiny", on_cpu(points(experiment(folder))[0].settings), 91.25)
    return json.loads((path / "run.json").read_text())


def parse(line):
    return record.parse(line, "tiny")


def refused(tree_or_line):
    line = tree_or_line if isinstance(tree_or_line, bytes) else json.dumps(tree_or_line).encode()
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the reason is returned
        parse(line)
    reason = str(caught.value)
    assert reason
    assert "\n" not in reason
    assert reason.isprintable()
    assert len(reason) < 400
    return reason


def changed(tree, path, value):
    """Return a copy with another value at a path such as "result.accuracy"; ... removes it."""
    copy = json.loads(json.dumps(tree))
    *above, last = path.split(".")
    place = copy
    for name in above:
        place = place[int(name) if isinstance(place, list) else name]
    if value is ...:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value
    return copy


def test_a_record_is_read_as_it_was_written(tree):
    line = json.dumps(tree, separators=(",", ":"))
    assert record.line(parse(line.encode())) == line
    assert list(tree) == ["identity", "settings", "environments", "curve", "result"]
    assert tree["curve"]["accuracy"] == [89.25, 90.25, 91.25]
    assert tree["result"]["weights_sha256"]
    assert [environment["commit"] for environment in tree["environments"]]


@pytest.mark.parametrize("every", [1, 2, 5])
def test_epochs_without_evaluation_take_no_space(tmp_path, every):
    path = finished(tmp_path, "tiny", on_cpu(points(experiment(tmp_path))[0].settings), every=every, old=True)
    made = whole(scan.look(path, pytest.fail))
    assert made.curve["evaluated"] == {1: [1, 2, 3], 2: [2, 3], 5: [3]}[every]
    names = ("epoch", "train_loss", "train_accuracy", "lr", "images_per_second", "seconds", "loss", "accuracy")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert history(made) == [{name: line[name] for name in names} for line in lines]


def test_180_runs_of_60_epochs_stay_near_a_megabyte(tmp_path):
    chosen = on_cpu(points(experiment(tmp_path))[0].settings)
    chosen = chosen.model_copy(update={"train": chosen.train.model_copy(update={"epochs": 60})})
    line = (finished(tmp_path, "tiny", chosen, 1000 / 11, every=60) / "run.json").read_text()
    assert 180 * len(line) < 1_100_000


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("identity", "0" * 12, "its settings have the identity"),
        ("identity", "../../etc", "identity"),
        ("identity", None, "identity: must be a string"),
        ("identity", ..., "identity: missing"),
        ("settings", ..., "settings: missing"),
        ("settings", [], "settings"),
        ("settings.seed", 1, "its settings have the identity"),
        ("settings.seed", "0", "settings.seed: must be an integer"),
        ("settings.train.epochs", 10**400, "must have at most 20"),
        ("settings.train.epochs", None, "settings.train.epochs: must be an integer"),
        ("settings.train.new_setting", 1, "settings.train.new_setting: unknown; a newer version"),
        ("settings.norm.method", "magic", "settings.norm.method"),
        ("settings.norm.new_option", 2, "settings.norm.new_option: unknown; a newer version"),
        ("settings.model.name", "mlp\x1b[2J", "must not contain control characters"),
        ("environments.0.numerics", "1", "environments.0.numerics: must be an integer"),
        ("environments.0.numerics", 0, "environments.0.numerics: must be 1 or more"),
        ("environments.0.numerics", True, "environments.0.numerics: must be an integer"),
        ("environments.0.commit", "a\nb", "environments.0.commit"),
        ("environments.0.commit", "x" * 301, "at most 300"),
        ("environments.0.extra", {"a": 1}, "environments.0.extra: must be a number, a text"),
        ("environments", [], "environments: must have"),
        ("environments", {}, "environments: must be a list"),
        ("environment", {}, "environment: unknown"),
        ("environments.0.started", "yesterday", "environments.0.started: must be a time"),
        ("curve.accuracy", [1.0], "equal lengths"),
        ("curve.train_loss", [1.0, 2.0], "equal lengths"),
        ("curve.train_loss", "abc", "curve.train_loss: must be a list"),
        ("curve.loss.0", "0.5", "curve.loss.0: must be a number"),
        ("curve.loss.0", -0.5, "curve.loss.0: must be 0 or more"),
        ("curve.accuracy.0", 100.5, "curve.accuracy.0: must be 100 or less"),
        ("curve.accuracy.2", 12.0, "must be the accuracy after the last epoch"),
        ("curve.evaluated", [1, 1, 3], "increasing epochs"),
        ("curve.evaluated", [1, 2, 4], "increasing epochs"),
        ("curve.more", [], "curve.more: unknown"),
        ("curve.lr", [0.1], "must be as long as train_loss"),
        ("result.accuracy", None, "accuracy must be a number"),
        ("result.accuracy", [91.25], "result.accuracy: must be a number"),
        ("result.accuracy", True, "result.accuracy: must be a number"),
        ("result.status", "finished?", "result.status"),
        ("result.status", "diverged", "null if it diverged"),
        ("result.split", "validation", "result.split=validation: data.evaluate is test"),
        ("result.epochs", 2, "train.epochs is 3"),
        ("result.seconds", -1, "result.seconds: must be 0 or more"),
        ("result.weights_sha256", "abc", "result.weights_sha256"),
        ("result.weights_sha256", ..., "result.weights_sha256: missing"),
        ("result.ended", 5, "result.ended: must be a string"),
        ("result.note", ["x"], "result.note: must be a number, a text"),
        ("noise", {}, "noise: must be a list"),
        ("extra", 1, "extra: unknown; a newer version"),
    ],
)  # fmt: skip
def test_a_malformed_record_is_refused(tree, path, value, reason):
    assert reason in refused(changed(tree, path, value))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "not complete JSON"),
        (b"\n", "not complete JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a":1,"a":2}', "the same name twice"),
        (b'{"a":NaN}', "NaN is not a number"),
        (b'{"a":-Infinity}', "-Infinity is not a number"),
        (b'{"a":1e999}', "identity: missing"),
        (b'{"a":' + b"9" * 400 + b"}", "an integer of 400 digits"),
        (b'{"a":' + b"9" * 10_000 + b"}", "an integer of 10000 digits"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a":' + b"[" * 20 + b"]" * 20 + b"}", "identity: missing"),
        (b'{"a":"\xff"}', "not UTF-8 at byte 7"),
        (b"<<<<<<< HEAD", "not complete JSON"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_line_that_is_not_json_is_refused(line, reason):
    assert reason in refused(line)


def test_every_truncation_is_refused(tree):
    line = json.dumps(tree, separators=(",", ":")).encode()
    for length in range(0, len(line), 7):
        refused(line[:length])


def places(tree, above=()):
    """List the paths of all values in a tree."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = [".".join(map(str, above))] if above else []
    return found + [path for name, each in inner for path in places(each, (*above, name))]


def read(line):
    """Return the record, or the reason for its refusal; any other exception fails the test."""
    try:
        return parse(line)
    except ValueError as error:
        return str(error)


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2), st.just(10**400), st.just("x" * 10_000),
    st.text(alphabet=string.printable, max_size=5),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_mutated_record_is_refused_or_still_valid(tree, data):
    """No value at any place makes anything but a valid record or a reason."""
    path = data.draw(st.sampled_from(places(tree)))
    odd = changed(tree, path, data.draw(ODD))
    line = json.dumps(odd).encode()
    made = read(line)
    if isinstance(made, str):
        assert made.isprintable()
    else:
        assert record.line(parse(record.line(made).encode())) == record.line(made)
        assert path != "identity"


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_flipped_bytes_are_refused_or_still_valid(tree, data):
    line = bytearray(json.dumps(tree, separators=(",", ":")).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    made = read(bytes(line))
    assert not isinstance(made, str) or "\n" not in made


def test_diverged_runs_have_records(tmp_path):
    path = finished(tmp_path, "tiny", on_cpu(points(experiment(tmp_path))[0].settings), status="diverged")
    made = scan.look(path, pytest.fail)
    assert made.status == "diverged"
    assert made.curve["train_loss"][-1] is None
    assert record.line(parse(record.line(made).encode())) == record.line(made)


def test_the_order_is_by_cell_and_seed(tmp_path):
    experiment_with_runs(tmp_path)
    ordered = sorted(scan.scan(tmp_path / "runs" / "tiny", pytest.fail).values(), key=record.order)
    cells = [(each.settings.norm.method, each.settings.norm.ghost_size, each.settings.seed) for each in ordered]
    assert [cell[2] for cell in cells] == [0, 1, 2] * 3
    assert len({cell[:2] for cell in cells[:3]}) == 1


def test_format_1_has_one_environment(tree):
    old = {name: value for name, value in tree.items() if name != "environments"}
    old["environment"] = tree["environments"][0]
    assert record.line(parse(json.dumps(old).encode())) == json.dumps(tree, separators=(",", ":"))


def test_a_folder_of_version_01_gives_the_same_record(tmp_path):
    settings = on_cpu(points(experiment(tmp_path))[0].settings)
    new, old = (finished(tmp_path / kind, "tiny", settings, old=kind == "old") for kind in ("new", "old"))
    assert record.line(whole(scan.look(old, pytest.fail))) == (new / "run.json").read_text().rstrip("\n")


@pytest.mark.parametrize("change", ["evaluated", "loss", "train_loss", "weights"])
def test_records_agree_if_they_differ_only_in_how_often_they_were_evaluated(tmp_path, change):
    """Which is no part of the identity."""
    settings = on_cpu(points(experiment(tmp_path))[0].settings)
    often, rarely = (scan.look(finished(tmp_path / str(n), "tiny", settings, every=n), pytest.fail) for n in (1, 3))
    assert often.curve["evaluated"] != rarely.curve["evaluated"]
    if change == "loss":
        rarely.curve["loss"][-1] += 1
    elif change == "train_loss":
        rarely.curve["train_loss"][0] += 1
    elif change == "weights":
        rarely.result["weights_sha256"] = "0" * 64
    assert record.agree(often, rarely) == record.agree(rarely, often) == (change == "evaluated")


@pytest.mark.slow
def test_five_thousand_records_are_read_in_a_second_and_a_half():
    """On an idle machine 5,000 in one second; here as a ratio to what Python's JSON parser needs at least."""
    lines = [line for path in sorted(RESULTS.glob("*/records.jsonl")) for line in path.read_bytes().splitlines()[1:]]
    parse(lines[0])

    def seconds(work):
        began = time.process_time()
        for line in lines:
            work(line)
        return time.process_time() - began

    assert min(seconds(parse) for _ in range(3)) < 10 * min(seconds(json.loads) for _ in range(3))


def test_all_published_records_are_valid():
    """Format 1: every line is a run with the identity that it has always had."""
    for path in sorted(RESULTS.glob("*/records.jsonl")):
        for line in path.read_bytes().splitlines()[1:]:
            assert parse(line).identity == json.loads(line)["identity"]
