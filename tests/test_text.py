import io
import subprocess
import sys

import pytest

from ghostnoise.text import counted, did_you_mean, duration, for_stream, nearest, wrapped


def test_nearest_ignores_case_and_keeps_the_candidates_spelling():
    assert nearest("RESNET8", ["ResNet18", "ResNet20", "vit"], count=2) == ["ResNet18", "ResNet20"]
    assert nearest("zzz", ["ResNet18"]) == []
    assert nearest("zzz", ["ResNet18"], cutoff=0) == ["ResNet18"]
    assert nearest("gni", []) == []


def test_suggestions_are_a_question_or_nothing():
    assert did_you_mean("digit", ["digits", "demo"]) == "did you mean digits?"
    assert did_you_mean("fig3", ["fig3-gni", "fig3-gbn"], count=2) in (
        "did you mean fig3-gni or fig3-gbn?",
        "did you mean fig3-gbn or fig3-gni?",
    )
    assert did_you_mean("gnj", ["gni"], show=repr) == "did you mean 'gni'?"
    assert did_you_mean("qqq", ["gni"]) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"), (9.9, "9.9 s"), (9.97, "10 s"), (59, "59 s"), (119, "119 s"), (120, "2.0 min"),
        (7199, "120 min"), (7200, "2.0 h"), (36_000, "10 h"), (172_800, "2.0 d"), (864_000, "10 d"),
    ],
)  # fmt: skip
def test_durations_have_the_unit_that_fits(seconds, text):
    assert duration(seconds) == text


def test_counts_have_a_plural():
    assert [counted(number, "run") for number in (0, 1, 2, 10_000)] == ["0 runs", "1 run", "2 runs", "10,000 runs"]


def test_importing_it_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import ghostnoise.text"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lines_are_broken_between_words_and_paths_stay_whole():
    path = "runs/" + "x" * 40
    assert wrapped(f"finished after two epochs; {path}\nsecond", 20).splitlines() == [
        "finished after two", "  epochs;", f"  {path}", "second",
    ]  # fmt: skip
    assert wrapped("short", 80) == "short"


def test_text_that_does_not_go_to_a_terminal_is_unchanged():
    assert for_stream("word " * 50, io.StringIO()) == "word " * 50
