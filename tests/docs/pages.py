"""Extracts the code blocks from the pages that users read."""

import re
from pathlib import Path

from attrs import frozen
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}

_DEV_COMMAND = re.compile(r"leasehold dev [\w:=. -]*[\w]")
_FILE_COMMENT = re.compile(r"# (\w+\.py)\n")


@frozen
class Block:
    """A block of code, with its language (`sh`, `python`, …), its text, and the line of the page on which it begins."""

    kind: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The name of the file in which a reader saves the block. The block's first line contains it as a comment."""
        match = _FILE_COMMENT.match(self.text) if self.kind == "python" else None
        return match[1] if match else None

    @property
    def commands(self) -> list[str]:
        """The shell commands in the block. Each is joined with its continuation lines."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def blocks(page: str) -> list[Block]:
    """Return all code blocks of a page, in order."""
    tokens = MarkdownIt().parse(PAGES[page].read_text(encoding="utf-8"))
    return [
        Block(token.info or token.type, token.content, token.map[0] + 1)
        for token in tokens
        if token.type in {"fence", "code_block"} and token.map
    ]


def dev_line(page: str) -> str | None:
    """Return the command that starts the local services that the page needs, or None."""
    match = _DEV_COMMAND.search(PAGES[page].read_text(encoding="utf-8"))
    return match[0] if match else None
