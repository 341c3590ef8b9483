"""Pages for users name only options that exist, and contain no laboratory notes."""

import re
from typing import get_type_hints

import pytest
from pages import ROOT

from leasehold.adapters.consumer.handling import Handling
from leasehold.adapters.options import Options, ProduceOptions, options_of

DOCS = ROOT / "docs"
LABORATORY = re.compile(r"\bnot met\b|\d: met\b|\bload (?:average )?of \d|\bload \d|(?<!-)\b[Ss]eeds? \d|two cores\b")
"""Whether a goal was met, how busy a machine was, and which seed failed."""
ONLY_OF_HANDLING = {"bench_seconds", "most_wait_seconds", "least_wait_seconds"}
"""Options that `handlers.md` names as fields of Handling, beside those of `leasehold.run`."""


def test_settings_of_a_producer_are_options_of_produce() -> None:
    """The table of settings lists every option of `leasehold.produce`, and no other name."""
    table = (DOCS / "producing.md").read_text(encoding="utf-8").partition("\n## Settings\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [*options_of(ProduceOptions)]


def test_seconds_that_the_page_of_handlers_names_are_options() -> None:
    """Every `…_seconds` on the page can be given to `leasehold.run`, or is named as a field of Handling."""
    named = set(re.findall(r"`(\w+_seconds)`", (DOCS / "handlers.md").read_text(encoding="utf-8")))
    assert named - {*options_of(Options)} - {"behind_seconds"} <= ONLY_OF_HANDLING
    assert {each for each in ONLY_OF_HANDLING if each in named} <= {*get_type_hints(Handling)}


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_page_has_no_notes_of_the_laboratory(page: str) -> None:
    """A page for users states results without machine loads, goals or seeds."""
    assert LABORATORY.findall((DOCS / page).read_text(encoding="utf-8")) == []
