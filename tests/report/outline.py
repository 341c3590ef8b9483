"""Parses a page of HTML as far as tests need it."""

from collections.abc import Sequence
from html.parser import HTMLParser


class Outline(HTMLParser):
    """The contents of the page: headings, table cells, findings, and every kind of element."""

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
        """Close the element, and any element inside it that has no end tag."""
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        """Add text to the open element."""
        if self.open and self.open[-1] in self.texts:
            self.texts[self.open[-1]][-1] += data.strip()
