"""The errors that users catch have one base, and all can be imported from the root."""

import ast
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
