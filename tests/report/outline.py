"""A page of HTML, taken apart as far as tests ask for it."""

from collections.abc import Sequence
from html.parser import HTMLParser


class Outline(HTMLParser):
    """What the page is made of: headings, cells of tables, findings, and every kind of element."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.open = set[str](), list[str]()
        self.texts: dict[str, list[str]] = {"h1": [], "h2": [], "li": [], "dd": [], "td": [], "text": []}
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:  # noqa: ARG002  not looked at
        self.tags.add(tag)
        self.open.append(tag)
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        """End it, and what has no end of its own."""
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        """Put text where it belongs."""
        if self.open and self.open[-1] in self.texts:
            self.texts[self.open[-1]][-1] += data.strip()
