"""Spark sources shorten the exceptions that they include in messages of their own, and put them on one line."""

import ast
from pathlib import Path

import leasehold.adapters.spark


def test_fault_within_a_message_is_bounded_and_on_one_line() -> None:
    (root,) = leasehold.adapters.spark.__path__
    locations = []
    for path in sorted(Path(root).rglob("*.py")):
        for handler in ast.walk(ast.parse(path.read_text())):
            # A process that lacks our packages has only Python's own message.
            if (
                isinstance(handler, ast.ExceptHandler)
                and handler.name
                and ast.unparse(handler.type or handler) != "ImportError"
            ):
                locations += [
                    f"{path.name}:{node.lineno}"
                    for node in ast.walk(handler)
                    if isinstance(node, ast.FormattedValue)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == handler.name
                ]
    assert locations == []
