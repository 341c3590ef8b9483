"""The errors that users catch have one base, and all can be imported from the root."""

import ast
import builtins
import inspect
from pathlib import Path

import leasehold
from leasehold import errors

PUBLIC = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}


def test_every_error_is_a_leasehold_error_and_exported_by_the_root() -> None:
    """One `except leasehold.LeaseholdError` catches every error that leasehold raises on purpose."""
    assert {name for name in PUBLIC if getattr(leasehold, name) is PUBLIC[name]} == set(PUBLIC)
    assert set(PUBLIC) <= set(leasehold.__all__)
    assert all(issubclass(kind, leasehold.LeaseholdError) for kind in PUBLIC.values())


def test_no_error_of_a_store_source_worker_or_producer_is_defined_outside_the_hierarchy() -> None:
    """A class elsewhere with the name of one of them is derived from one of them."""
    root = Path(leasehold.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name in PUBLIC:
                assert path == Path(errors.__file__)


INTERNAL = {
    "BadDeadLetter",
    "BadJsonField",
    "BadRowField",
    "ChildFault",
    "ConnectFailed",
    "ConversationError",
    "Ended",
    "HistoryError",
    "MalformedAggregate",
    "MalformedMessage",
    "NotThere",
    "NotTried",
    "ResponseCutOff",
    "ResponsePending",
    "ResponseTimeout",
    "ServiceError",
    "Unhandled",
    "Unreadable",
    "Unsplit",
    "_EndRequested",
    "_UnsupportedCallError",
}
"""Exceptions outside the hierarchy. The module or command that raises each of them also catches it."""


def test_every_exception_is_in_the_hierarchy_or_caught_inside() -> None:
    """A new class of exception that callers could meet is derived from LeaseholdError."""
    root, bases = Path(leasehold.__file__).parent, dict[str, set[str]]()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(base.id for base in node.bases if isinstance(base, ast.Name))
    builtin = {
        name for name, kind in vars(builtins).items() if inspect.isclass(kind) and issubclass(kind, BaseException)
    }
    outside = set[str]()
    while more := {name for name, of in bases.items() if of & (builtin | outside)} - outside - {"LeaseholdError"}:
        outside |= more
    first = {name for name in outside if bases[name] & builtin}
    assert first == INTERNAL


def test_every_error_is_explained_in_the_reference() -> None:
    """The page that lists the errors names each of them, the base included."""
    page = (Path(__file__).parents[1] / "docs" / "reference.md").read_text(encoding="utf-8")
    assert [name for name in PUBLIC if f"`{name}`" not in page] == []
