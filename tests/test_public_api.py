"""Tests that public names change only with their list and, after a release, with a note for users."""

import re
import tomllib

from public_api import BEFORE, NOW, ROOT, public_api

FRAGMENTS = ROOT / "changelog.d"


def _entries(text: str) -> dict[str, str]:
    """Return the signature and the members of each name."""
    entries, name = {}, ""
    for line in text.splitlines():
        if line.startswith("  #"):
            name = ""  # this line is the reason for the next names
        elif name_match := re.match(r"  (?:class |def )?(\w+)", line):
            name = name_match[1]
            entries[name] = ""
        if name:
            entries[name] += f"{line}\n"
    return entries


def _unannounced(before: str, now: str, announced: str) -> set[str]:
    """Return the names that differ between two lists, and do not appear in backticks in `announced`."""
    old, new = _entries(before), _entries(now)
    changed = {name for name in old | new if old.get(name) != new.get(name)}
    return {name for name in changed if not re.search(rf"`[^`]*\b{name}\b[^`]*`", announced)}


def test_public_name_list_is_complete() -> None:
    assert NOW.read_text() == public_api(), "run `make api`, and tell users in changelog.d/"


def test_every_change_of_a_public_name_since_the_last_release_is_announced() -> None:
    """A changed public name appears in backticks in a fragment or in the top section of the changelog."""
    fragments = "\n".join(path.read_text() for path in FRAGMENTS.glob("+*.md"))
    top = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    released_names = BEFORE.read_text() if BEFORE.exists() else NOW.read_text()  # there is no release yet
    assert _unannounced(released_names, NOW.read_text(), f"{top}\n{fragments}") == set()


def test_a_changed_name_counts_as_announced_only_in_backticks() -> None:
    """Names that were added, removed or changed are unannounced until they appear in backticks."""
    before, now = "  def run(a)\n  def read()\n  def gone()\n", "  def run(a, b)\n  def read()\n  def new()\n"
    assert _unannounced(before, now, "run, and `leasehold.new`") == {"run", "gone"}


def test_every_changelog_fragment_has_a_valid_towncrier_name() -> None:
    """Every file in changelog.d is named +SUBJECT.KIND.md, with a kind from pyproject.toml."""
    kinds = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
    form = re.compile(rf"\+[a-z0-9-]+\.(?:{'|'.join(kind['directory'] for kind in kinds)})\.md|README\.md")
    assert [path.name for path in FRAGMENTS.iterdir() if not form.fullmatch(path.name)] == []
