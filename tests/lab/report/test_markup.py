"""Text that becomes part of an HTML page."""

import json

from ghostnoise.lab.report.markup import json_in_html


def test_embedded_json_cannot_end_its_script():
    nasty = {"a": "</script><!-- & \u2028"}
    made = json_in_html(nasty)
    assert not set("<>&\u2028") & set(made)
    assert json.loads(made) == nasty
