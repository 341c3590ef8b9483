"""Lets the site show what lies outside `docs`, under the links that are there.

README is its front page; the rest are rules, pictures and source files.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([\w./-]+)((?:#[\w-]+)?)\)")
FRONT = "index.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README, the rules, and every file outside that a page of `docs`, or README, names."""
    pages = [ROOT / "README.md", *Path(config.docs_dir).glob("*.md")]
    named = {_target(page, found[3]) for page in pages for found in LINK.finditer(page.read_text(encoding="utf-8"))}
    rules = {str(path.relative_to(ROOT)) for path in (ROOT / "specs").rglob("*.md")}
    for path in sorted(name for name in named | rules if not name.startswith("docs/") and (ROOT / name).is_file()):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, FRONT, abs_src_path=str(ROOT / "README.md")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at where the site has the file; what it has not stays as its words."""
    place = _place(page.file.src_uri, Path(config.docs_dir))

    def pointed(found: re.Match[str]) -> str:
        target = _target(place, found[3]).removeprefix("docs/")
        if files.get_file_from_path(target) is None:  # a folder, say; what is nowhere is left for the strict build
            return found[2] if (ROOT / _target(place, found[3])).exists() else found[0]
        link = posixpath.relpath(target, posixpath.dirname(page.file.src_uri))
        return f"{found[1]}[{found[2]}]({link}{found[4]})"

    return LINK.sub(pointed, markdown)


def _place(uri: str, docs: Path) -> Path:
    """Where a page of the site lies in the repository."""
    if uri == FRONT:
        return ROOT / "README.md"
    return docs / uri if (docs / uri).exists() else ROOT / uri


def _target(page: Path, link: str) -> str:
    """What a link names, from the top of the repository; "." for a page's own heading."""
    return posixpath.normpath(posixpath.join(page.parent.relative_to(ROOT).as_posix(), link))
