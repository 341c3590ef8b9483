"""Tests that no value in a row, such as an owner's name, can control the terminal."""

import logging
from pathlib import Path

import pytest
from odd_values import SHOWN_BY, unsayable
from typer.testing import CliRunner

from leasehold.adapters.cli import copy_leases, leases, reset
from leasehold.balancer.model import Lease, Position
from leasehold.stores.embedded.sqlite import SqliteStore
from leasehold.stores.printable import (
    TEXT_LENGTH_MAX,
    error_summary,
    join_limited,
    make_safe_logger,
    printable,
    printable_lines,
)
from leasehold.stores.writes import CreateLease, RequestLease
from leasehold_lab.contract.actors import create_lease_with_owner, expect_applied

ESCAPE = "\x1b]0;mine\x07\x1b[2J"
SHOWN = r"\x1b]0;mine\x07\x1b[2J"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a table in which a key, an owner, a next owner and a bad row contain terminal escapes."""
    path = tmp_path / "leases.db"
    store = SqliteStore(str(path))
    row = create_lease_with_owner(
        store, Lease(f"{ESCAPE}-key", owner=f"{ESCAPE}-ann", checkpoint=Position("9"), weight=1_024)
    )
    expect_applied(store.write(RequestLease(row, f"{ESCAPE}-bob")))
    connection = store._connection  # noqa: SLF001  no store's own write creates such a row
    connection.execute(
        "INSERT INTO leases (key, shard, counter, checkpoint) VALUES (?, ?, 0, ?)", (f"{ESCAPE}-bad", "s", "x")
    )
    store.close()
    return f"sqlite://{path}"


def output_of(*arguments: str) -> str:
    """Run a command, and return everything that it printed."""
    app = {"leases": leases, "reset": reset, "copy-leases": copy_leases}[arguments[0]].app
    result = CliRunner(env={"COLUMNS": "250"}).invoke(app, arguments[1:])
    return result.output


def harmless(text: str) -> bool:
    """Return whether each line of the text contains only printable characters."""
    return all(line.isprintable() for line in text.splitlines())


@pytest.mark.parametrize("by", [(), ("--by", "worker"), ("--by", "group")])
def test_leases_table_escapes_control_characters(url: str, by: tuple[str, ...]) -> None:
    """A worker's name must not be able to clear the screen or set the terminal's title."""
    output = output_of("leases", url, *by)
    assert SHOWN in output
    assert harmless(output)


@pytest.mark.parametrize("command", [("reset", "--to", "LATEST"), ("copy-leases", "memory://printable")])
def test_message_about_an_unusable_value_escapes_control_characters(url: str, command: tuple[str, ...]) -> None:
    output = output_of(command[0], url, *command[1:])
    assert SHOWN in output
    assert harmless(output)


def test_dry_run_moves_escape_control_characters(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "leases.db"))
    expect_applied(store.write(CreateLease(Lease(ESCAPE, checkpoint=Position("9")))))
    store.close()
    output = output_of("reset", f"sqlite://{tmp_path}/leases.db", "--to", "LATEST", "--dry-run")
    assert SHOWN in output
    assert harmless(output)


def test_log_line_is_one_line_whatever_it_contains(caplog: pytest.LogCaptureFixture) -> None:
    """An owner's name must not be able to forge a line of the log."""
    log = make_safe_logger(logging.getLogger("leasehold.printable"))
    log.error("worker %s\n2026-01-01 ERROR forged", ESCAPE, exc_info=ValueError(f"lease {ESCAPE}"))
    assert caplog.messages == [rf"worker {SHOWN}\n2026-01-01 ERROR forged"]
    assert harmless(caplog.text)
    assert f"ValueError: lease {SHOWN}" in caplog.text


def test_every_logger_of_ours_escapes_names() -> None:
    root = Path(__file__).parents[1]
    loggers = [
        (path.name, line)
        for folder in ("adapters", "stores", "lab")
        for path in sorted((root / folder).rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("log = ")
    ]
    assert len(loggers) > 20
    assert [logger for logger in loggers if not logger[1].startswith("log = make_safe_logger(logging.getLogger(")] == []


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("s-1 ü 漢 '$'", "s-1 ü 漢 '$'"),
        ("a\tb\r", r"a\tb\r"),
        ("\x9b2J\x7f", r"\x9b2J\x7f"),
        ("\u202egnp", r"\u202egnp"),
        ("\u2028", r"\u2028"),
        ("\ud800", r"\ud800"),
    ],
)
def test_invisible_characters_are_escaped(text: str, safe: str) -> None:
    """Eight-bit escapes, bidirectional controls and lone surrogates are escaped."""
    assert printable(text) == safe
    assert printable_lines(f"one\n{text[:3]}") == f"one\n{printable(text[:3])}"


@pytest.mark.parametrize("base", [Exception, BaseException])
@pytest.mark.parametrize("by", SHOWN_BY)
def test_exception_is_formatted_whatever_its_class_does(by: str, base: type[BaseException]) -> None:
    text = error_summary(unsayable(by, base))
    assert text.startswith("Unsayable: ")
    assert len(text) <= TEXT_LENGTH_MAX + 20
    assert text.isprintable()
    assert text.encode("utf-8").decode() == text


@pytest.mark.parametrize("by", SHOWN_BY)
def test_a_line_of_the_log_costs_its_caller_nothing(by: str, caplog: pytest.LogCaptureFixture) -> None:
    """The filter runs within the logging call. If it raised, the caller, such as a worker's thread, would end."""
    log = make_safe_logger(logging.getLogger("leasehold.printable"))
    fault = unsayable(by)
    log.error("it failed: %s", fault, exc_info=fault)
    log.error("it failed: %r", fault)
    log.error("it failed: %d", "no number")
    assert len(caplog.messages) == 3
    assert all(text.startswith("it failed: ") and text.isprintable() for text in caplog.messages)
    assert len(caplog.messages[0]) <= TEXT_LENGTH_MAX + 20


def test_log_line_lists_a_few_names_and_counts_the_rest() -> None:
    keys = [f"shard-{number}" for number in range(1000)]
    assert join_limited(keys) == "shard-0, shard-1, shard-2, shard-3, shard-4 and 995 more"
    assert [join_limited(keys[:5]), join_limited(keys[:2], 1, "; "), join_limited([])] == [
        ", ".join(keys[:5]),
        "shard-0 and 1 more",
        "",
    ]
