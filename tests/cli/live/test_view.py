"""Tests of the live view without a terminal: the effect of each key, and the order of the rows."""

from functools import reduce

import pytest
from attrs import evolve

from leasehold.adapters.cli.common.columns import Column, TextTable
from leasehold.adapters.cli.live import KEY_HELP, LiveView, apply_key, arrange_rows, find_selected_row

CELLS = TextTable(
    (Column("lease"), Column("owner"), Column("lag s", right=True)),
    (("s-0", "ann", "2.5"), ("s-1", "", ""), ("s-2", "bob", "10.0"), ("s-3", "Ann", "0.0")),
    styles=(((1, 1), "red"),),
)


def press(*keys: str, view: LiveView | None = None) -> LiveView:
    """Return the view after these keys, pressed one after the other."""
    return reduce(lambda now, key: apply_key(now, key, arrange_rows(CELLS, now)), keys, view or LiveView())


def first_cells(view: LiveView) -> list[str]:
    """Return the first cell of each row shown."""
    return [row[0] for row in arrange_rows(CELLS, view).rows]


def test_rows_are_sorted_by_the_first_column() -> None:
    assert first_cells(LiveView()) == ["s-0", "s-1", "s-2", "s-3"]
    assert first_cells(press("r")) == ["s-3", "s-2", "s-1", "s-0"]


def test_numbers_sort_descending_and_empty_cells_last() -> None:
    assert first_cells(press("s", "s")) == ["s-2", "s-0", "s-3", "s-1"]
    assert first_cells(press("s", "s", "r")) == ["s-3", "s-0", "s-2", "s-1"]
    assert press("s", "s", "s") == LiveView(sort="lease")


def test_a_style_stays_with_its_row() -> None:
    """The row of the lease without an owner is red in every sort order."""
    assert arrange_rows(CELLS, press("s", "s")).styles == (((3, 1), "red"),)
    assert arrange_rows(CELLS, press("/", "b", "o", "b")).styles == ()


def test_a_filter_applies_while_it_is_typed_in_any_case() -> None:
    """While the user types a filter, `q` is part of the filter and does not quit."""
    typing = press("/", "q", "backspace", "a", "n", "left", "n")
    assert (typing.filter_text, typing.typing, first_cells(typing)) == ("ann", True, ["s-0", "s-3"])
    applied = press("enter", view=typing)
    assert (applied.filter_text, applied.typing) == ("ann", False)
    assert press("escape", view=typing) == press("escape", view=applied) == LiveView()


def test_the_chosen_row_stays_within_the_rows_shown() -> None:
    assert [press(*keys).selected for keys in (["down"], ["j", "j", "k"], ["page-down"], ["end"], ["G", "home"])] == [
        "s-1",
        "s-1",
        "s-3",
        "s-3",
        "s-0",
    ]
    assert press("up").selected == "s-0"
    assert press("s", "s", "down").selected == "s-0"
    hidden = evolve(press("end"), filter_text="bob")
    assert find_selected_row(arrange_rows(CELLS, hidden), hidden) == 0
    assert press("down", view=LiveView(filter_text="none")).selected == ""


def test_a_lease_opens_and_closes() -> None:
    """Closing the page of a lease keeps the filter."""
    opened_view = press("/", "a", "enter", "down", "enter")
    assert (opened_view.page, opened_view.selected) == ("lease", "s-3")
    assert press("up", view=opened_view) == evolve(opened_view, selected="s-0")
    assert press("s", "/", "b", view=opened_view) == opened_view
    assert press("escape", view=opened_view) == evolve(opened_view, page="table")
    assert press("enter", view=LiveView(filter_text="none")).page == "table"


def test_opening_a_worker_shows_its_leases() -> None:
    assert press("b").by == "worker"
    assert press("b", "b", "b").by is None
    assert press("enter", view=LiveView(by="worker", selected="s-2")) == LiveView(filter_text="s-2")


@pytest.mark.parametrize("view", [LiveView(), LiveView(page="lease"), LiveView(page="help")])
def test_q_quits_from_every_view(view: LiveView) -> None:
    assert press("q", view=view) == evolve(view, is_closed=True)


def test_the_help_lists_every_key_and_closes_with_any() -> None:
    assert press("?").page == "help"
    assert press("?", "s") == LiveView()
    documented = {key for keys, _ in KEY_HELP for key in keys.split(", ")}
    assert {"s", "r", "/", "b", "enter", "escape", "?", "q", "up", "down", "page-up", "home"} <= documented


@pytest.mark.parametrize("key", ["x", "é", "backspace", "left", "\x00"])
def test_an_unknown_key_changes_nothing(key: str) -> None:
    assert press(key) == LiveView()
