"""A strict reader of the report's HTML page."""

from html.parser import HTMLParser

from ghostnoise.lab.report.files import NAMES

VOID = {"meta", "link", "br", "input", "img", "hr"}


class Reader(HTMLParser):
    """Checks that tags are nested correctly; keeps tags, texts and scripts."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.texts, self.scripts = [], [], [], []

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.texts.append(data)

    def ids(self):
        return [attrs["id"] for _, attrs in self.tags if "id" in attrs]


def read(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def check(reader, files=NAMES):
    """Check that a page is well-formed, runs only its own scripts and links only to the report's files."""
    ids = reader.ids()
    assert len(set(ids)) == len(ids)
    assert len(reader.scripts) == 2
    assert [tag for tag, _ in reader.tags].count("h1") == 1
    assert not {"iframe", "object", "embed", "base", "img"} & {tag for tag, _ in reader.tags}
    for tag, attrs in reader.tags:
        assert not any(name.startswith("on") for name in attrs)
        assert "src" not in attrs
        if "href" in attrs:
            assert attrs["href"] in ("data:,", *(name for name in files if name != "index.html")) or attrs[
                "href"
            ].startswith("#")
        if tag == "label" and "for" in attrs:
            assert attrs["for"] in ids
    (policy,) = [attrs["content"] for _, attrs in reader.tags if "http-equiv" in attrs]
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe-inline'" not in policy
