"""Text that becomes part of an HTML page."""

import json

from ghostnoise.lab.report import markup
from ghostnoise.lab.report.markup import TableCell, json_in_html


def test_embedded_json_cannot_end_its_script():
    nasty = {"a": "</script><!-- & \u2028"}
    made = json_in_html(nasty)
    assert not set("<>&\u2028") & set(made)
    assert json.loads(made) == nasty


def test_columns_without_a_value_are_left_out_and_the_others_keep_their_ids():
    html = markup.table("t", "caption", ["a", "b", "c"], [["x", "–", TableCell("1.50", 1.5)], ["y", "", "–"]])
    assert ('id="t-0"' in html, 'id="t-1"' in html, 'id="t-2"' in html) == (True, False, True)
    assert html.count("<td") == 2


def test_a_number_is_repeated_for_sorting_only_if_the_text_is_another():
    rows = [
        [TableCell("1,234", 1234.0), TableCell("35.2 s", 35.21)],
        [TableCell("91.30", 91.3), TableCell("2.0 h", 7200)],
    ]
    html = markup.table("t", "caption", ["a", "b"], rows)
    assert html.count("data-number") == 2
    assert 'data-number="35.21"' in html


def test_a_colour_is_a_dot_before_the_text():
    html = markup.table("t", "caption", ["a"], [[TableCell("GNI", color=("#bf3a00", "#e9740f"))]])
    assert '<span class="dot tint" style="--l:#bf3a00;--d:#e9740f"></span>GNI' in html
