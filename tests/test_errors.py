"""Tests that all errors that users catch have one base class, and can be imported from `leasehold`."""

import ast
import builtins
import inspect
from pathlib import Path

import leasehold
from leasehold import errors

PUBLIC = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}


def test_every_error_is_a_leasehold_error_and_exported_by_the_root() -> None:
    assert {name for name in PUBLIC if getattr(leasehold, name) is PUBLIC[name]} == set(PUBLIC)
    assert set(PUBLIC) <= set(leasehold.__all__)
    assert all(issubclass(kind, leasehold.LeaseholdError) for kind in PUBLIC.values())


def test_error_of_a_store_source_worker_or_producer_is_in_the_hierarchy() -> None:
    """No class outside `leasehold.errors` has the name of a public error."""
    root = Path(leasehold.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name in PUBLIC:
                assert path == Path(errors.__file__)


INTERNAL = {
    "adapters/cli/common/ending.py",
    "adapters/cli/produce.py",
    "adapters/consumer/dead_letters/dead_letter.py",
    "adapters/consumer/handling.py",
    "adapters/json_form.py",
    "adapters/lambda_processes.py",
    "adapters/multilang/children.py",
    "adapters/multilang/protocol.py",
    "adapters/ops/doctor/attempts.py",
    "adapters/ops/serving/watcher.py",
    "adapters/sources/call_timeouts.py",
    "adapters/sources/kinesis/aggregation/decode.py",
    "adapters/sources/kinesis/aggregation/wire.py",
    "adapters/sources/kinesis/cbor/hooks.py",
    "adapters/toolchain.py",
    "stores/aws_calls/calls.py",
    "stores/aws_calls/connections.py",
    "stores/aws_calls/pages.py",
    "stores/fields.py",
}
"""Modules with exceptions outside the hierarchy. The modules themselves or the commands catch these exceptions."""


def test_every_exception_is_in_the_hierarchy_or_caught_inside() -> None:
    """Every exception class that callers could get is derived from LeaseholdError."""
    root, bases, modules = Path(leasehold.__file__).parent, dict[str, set[str]](), dict[str, set[str]]()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(base.id for base in node.bases if isinstance(base, ast.Name))
                modules.setdefault(node.name, set()).add(str(path.relative_to(root)))
    classes = {name: kind for name, kind in vars(builtins).items() if inspect.isclass(kind)}
    builtin_exceptions = {name for name, kind in classes.items() if issubclass(kind, BaseException)}
    outside_classes = {name for name, base_names in bases.items() if base_names & builtin_exceptions} - {
        "LeaseholdError"
    }
    assert set().union(*(modules[name] for name in outside_classes)) == INTERNAL


def test_every_error_is_explained_in_the_reference() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference.md").read_text(encoding="utf-8")
    assert [name for name in PUBLIC if f"`{name}`" not in page] == []


def test_position_that_is_gone_is_not_read_again() -> None:
    """A read of a trimmed position fails each time, so `Trimmed` is no error after which a worker tries again."""
    assert not issubclass(leasehold.Trimmed, leasehold.SourceUnavailable)


def test_error_of_one_part_is_no_error_of_another() -> None:
    """A handler that catches the errors of the store and tries again does not catch those that end the worker."""
    kinds = [leasehold.StoreError, leasehold.SourceError, leasehold.WorkerError, leasehold.ProducerError]
    assert [[issubclass(kind, other) for other in kinds] for kind in kinds] == [
        [kind is other for other in kinds] for kind in kinds
    ]
