"""Lets the site show what lies outside `docs`, under the links that are there: rules, pictures and source files.

A picture that a benchmark has drawn becomes part of its page, so that it has the page's colours, light or dark.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([\w./-]+)((?:#[\w-]+)?)\)")
DRAWN = re.compile(r"benchmarks/results/\w+\.svg")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the rules, and every file outside that a page of `docs` names."""
    pages = Path(config.docs_dir).glob("*.md")
    named = {_target(page, found[3]) for page in pages for found in LINK.finditer(page.read_text(encoding="utf-8"))}
    rules = {str(path.relative_to(ROOT)) for path in (ROOT / "specs").rglob("*.md")}
    for path in sorted(name for name in named | rules if not name.startswith("docs/") and (ROOT / name).is_file()):
        if not DRAWN.fullmatch(path):
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at where the site has the file; what it has not stays as its words.

    Pages from outside `docs` are left out of the search: they are for contributors.
    """
    if not (Path(config.docs_dir) / page.file.src_uri).exists():
        page.meta["search"] = {"exclude": True}
    place = _place(page.file.src_uri, Path(config.docs_dir))

    def pointed(found: re.Match[str]) -> str:
        named = _target(place, found[3])
        if found[1] and DRAWN.fullmatch(named) and (ROOT / named).is_file():
            return _figure(ROOT / named, found[2])
        target = named.removeprefix("docs/")
        if files.get_file_from_path(target) is None:  # a folder, say; what is nowhere is left for the strict build
            return found[2] if (ROOT / named).exists() else found[0]
        link = posixpath.relpath(target, posixpath.dirname(page.file.src_uri))
        return f"{found[1]}[{found[2]}]({link}{found[4]})"

    return LINK.sub(pointed, markdown)


def _figure(picture: Path, words: str) -> str:
    """The drawing itself; lines without anything would end the block of HTML."""
    drawn = picture.read_text(encoding="utf-8")
    lines = [line for line in drawn[drawn.index("<svg") :].splitlines() if line.strip()]
    text = "\n".join(lines).replace("<svg ", f'<svg role="img" aria-label="{words}" ', 1)
    return f'<figure class="drawn">\n{text}\n</figure>'


def _place(uri: str, docs: Path) -> Path:
    """Where a page of the site lies in the repository."""
    return docs / uri if (docs / uri).exists() else ROOT / uri


def _target(page: Path, link: str) -> str:
    """What a link names, from the top of the repository; "." for a page's own heading."""
    return posixpath.normpath(posixpath.join(page.parent.relative_to(ROOT).as_posix(), link))
