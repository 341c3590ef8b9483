"""What users import changes only in writing: in the list of public names, and in a line for them."""

import re

from public_api import BEFORE, NOW, ROOT, public_api


def _entries(text: str) -> dict[str, str]:
    """Each name, with its signature and its members."""
    found, name = {}, ""
    for line in text.splitlines():
        if begun := re.match(r"  (?:class |def )?(\w+)", line):
            name = begun[1]
            found[name] = ""
        if name:
            found[name] += f"{line}\n"
    return found


def test_the_list_of_public_names_is_what_there_is() -> None:
    """Without it a signature could change, and nobody who reviews the change would see that users are affected."""
    assert NOW.read_text() == public_api(), "run `make api`, and tell users in the top section of CHANGELOG.md"


def test_each_change_of_a_public_name_is_told() -> None:
    """Without it users would learn of a change from the traceback of their own program."""
    before, now = _entries(BEFORE.read_text()), _entries(NOW.read_text())
    changed = {name for name in before | now if before.get(name) != now.get(name)}
    top = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert {name for name in changed if not re.search(rf"`[^`]*\b{name}\b[^`]*`", top)} == set()
