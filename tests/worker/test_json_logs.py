"""Log lines in JSON, with fields by which they can be searched in a log collector."""

import json
import logging

import pytest
from virtual_fleet import FaultyStore, four_shards, member
from waiters import Clock

from leasehold.adapters.consumer.events import JsonLines
from leasehold_lab.simulator.world.world import ListSource


def test_taken_lease_is_logged_with_rule_and_outcome(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "leasehold")
    driven_worker = member(FaultyStore(), ListSource(four_shards()), Clock())
    driven_worker.run(60)
    lines = [json.loads(JsonLines("a-1").format(record)) for record in caplog.records]
    claim_lines = [line for line in lines if line["message"].startswith("Claim of lease ")]
    assert {(line["lease"], line["rule"], line["outcome"]) for line in claim_lines} >= {("s-1", "K5", "done")}
    assert {line["lease"] for line in claim_lines} == {"s-0", "s-1", "s-2", "s-3"}
    assert {line["worker"] for line in lines} == {"a-1"}


def test_json_log_line_keeps_a_traceback_that_was_formatted_before() -> None:
    """A log record that comes from another process has only the text of its traceback."""
    record = logging.LogRecord("a", logging.ERROR, __file__, 1, "failed", None, None)
    record.exc_text = "Traceback: OSError"
    assert json.loads(JsonLines("a-1").format(record))["trace"] == "Traceback: OSError"


def test_json_log_line_is_a_single_line() -> None:
    try:
        raise ValueError("x\ny")  # noqa: TRY301  the test needs a traceback
    except ValueError as error:
        exc_info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("leasehold.x", logging.ERROR, "", 0, "lease %s", ("a\nb",), exc_info)
    line = JsonLines("w").format(record)
    entry = json.loads(line)
    assert "\n" not in line
    assert (entry["message"], entry["level"], entry["trace"].endswith("ValueError: x\ny")) == (
        "lease a\nb",
        "ERROR",
        True,
    )
