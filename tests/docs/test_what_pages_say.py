"""Tests that users' pages name only what exists, that their tables are complete, and that they have no test notes."""

import json
import re
from pathlib import Path
from typing import get_type_hints

import botocore.session
import pytest
from pages import ROOT
from typer.main import get_command

from leasehold.adapters.cli import lease_tables
from leasehold.adapters.cli.main import app
from leasehold.adapters.consumer import metrics
from leasehold.adapters.consumer.dead_letters.dead_letter import DeadLetterEntry
from leasehold.adapters.consumer.handling import Handling
from leasehold.adapters.consumer.status import NUMBERS
from leasehold.adapters.options import Options, ProduceOptions, options_by_name
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.spark.event_hubs.options import EVENT_HUBS_SOURCE
from leasehold.adapters.spark.event_hubs.options import WITHOUT_EFFECT as EVENT_HUBS_IGNORED
from leasehold.adapters.spark.kinesis.options import WITHOUT_EFFECT as KINESIS_IGNORED

DOCS = ROOT / "docs"
LABORATORY_PHRASES = re.compile(
    r"\bnot met\b|\d: met\b|\bload (?:average )?of \d|\bload \d|(?<!-)\b[Ss]eeds? \d|two cores\b"
)
"""Phrases such as whether a goal was met, how busy a machine was, or which seed failed."""
HANDLING_ONLY_FIELDS = {"cooldown_seconds", "most_wait_seconds", "least_wait_seconds"}
"""Fields of Handling that `handlers.md` names, but that are not options of `leasehold.run`."""


def test_settings_of_a_producer_are_options_of_produce() -> None:
    table = (DOCS / "producing.md").read_text(encoding="utf-8").partition("\n## Settings\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [*options_by_name(ProduceOptions)]


def test_durations_on_the_page_of_handlers_are_options() -> None:
    """Every `…_seconds` on the page is an option of `leasehold.run` or a field of Handling."""
    documented_names = set(re.findall(r"`(\w+_seconds)`", (DOCS / "handlers.md").read_text(encoding="utf-8")))
    assert documented_names - {*options_by_name(Options)} - {"behind_seconds"} <= HANDLING_ONLY_FIELDS
    assert {field_name for field_name in HANDLING_ONLY_FIELDS if field_name in documented_names} <= {
        *get_type_hints(Handling)
    }


def table_after(page: str, heading: str) -> list[list[str]]:
    """Return the rows of the first table under a heading of a page, without backticks."""
    section = (DOCS / page).read_text(encoding="utf-8").partition(f"{heading}\n")[2]
    lines = re.search(r"(?m)(^\|.*\n)+", section)
    assert lines, f"{page}: {heading} has no table"
    rows = [line.strip().strip("|").replace("`", "").split("|") for line in lines[0].splitlines()]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_table_of_statuses_has_the_words_and_numbers_of_the_code() -> None:
    """The page lists all statuses, and no others, with the numbers that commands and metrics use."""
    assert {word: int(number) for word, number, *_ in table_after("status.md", "# Statuses")} == NUMBERS


def test_table_of_metrics_has_the_names_of_the_code() -> None:
    code = Path(metrics.__file__).read_text(encoding="utf-8")
    exported = re.findall(r'create_counter\("(\w+)"', code) + re.findall(r"WorkerMetrics\.(\w+),", code)
    assert sorted(row[0] for row in table_after("metrics.md", "## All metrics")) == sorted(exported)


def test_every_column_of_leases_is_explained() -> None:
    optional_columns = (lease_tables.TABLE_COLUMN, lease_tables.EVENTS_COLUMN)
    column_names = {
        column.name for column in (*lease_tables.LEASE_COLUMNS, *lease_tables.SHARE_COLUMNS, *optional_columns)
    }
    rows = table_after("steering.md", "## Consumer lag: how far behind is the group")
    explained = {name.partition(" (")[0] for row in rows for name in row[0].split(", ")}
    assert explained == column_names


def test_table_of_loggers_has_the_loggers_of_the_code() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "leasehold").rglob("*.py"))
    documented_loggers = [
        name for row in table_after("logging.md", "## Choose single loggers") for name in row[0].split(", ")
    ]
    assert sorted(documented_loggers) == sorted(set(re.findall(r'getLogger\("(leasehold\.\w+)"\)', code)))


def test_table_of_a_dead_letter_has_the_fields_of_the_code() -> None:
    dead_letter = DeadLetterEntry("", "orders", "s-0", "s-0", Record(b"", "1", 0, "k"), "", "", 1, "w", 0)
    documented_fields = [
        name for row in table_after("dead-letters.md", "## Dead-letter format") for name in row[0].split(", ")
    ]
    assert sorted(documented_fields) == sorted(json.loads(dead_letter.line))


def test_options_of_other_connectors_are_on_the_page_that_migrates_from_them() -> None:
    rejected = [option.name for option in EVENT_HUBS_SOURCE if not option.in_docs]
    cells = "".join(row[0] for row in table_after("spark.md", "## Migrate from another connector"))
    assert rejected
    assert [name for name in (*rejected, *EVENT_HUBS_IGNORED, *KINESIS_IGNORED) if name not in cells] == []


SETTINGS_OF_OTHER_SOURCES = {
    "AmazonManagedKafkaEventSourceConfig",
    "DocumentDBEventSourceConfig",
    "LoggingConfig",
    "ProvisionedPollerConfig",
    "Queues",
    "ScalingConfig",
    "SelfManagedEventSource",
    "SelfManagedKafkaEventSourceConfig",
    "SourceAccessConfigurations",
    "Topics",
}
"""Settings of an event source mapping that Kinesis and DynamoDB Streams don't have."""


def test_table_of_mapping_settings_is_complete_and_valid() -> None:
    """The page has every setting of a stream's event source mapping, and names only existing options of `consume`."""
    rows = table_after("from-lambda.md", "## Settings of the mapping")
    lambda_model = botocore.session.get_session().get_service_model("lambda")
    request = lambda_model.shape_for("CreateEventSourceMappingRequest")
    settings = {*request.members} - SETTINGS_OF_OTHER_SOURCES  # type: ignore[attr-defined]  # of a structure
    assert {name for row in rows for name in re.findall(r"\b[A-Z]\w+", row[0])} == settings
    group = get_command(app)
    with group.make_context("leasehold", ["consume"]) as context:
        _, consume, _ = group.resolve_command(context, ["consume"])  # type: ignore[attr-defined]
    options = {option for parameter in consume.params for option in parameter.opts}
    page = (DOCS / "from-lambda.md").read_text(encoding="utf-8").partition("## What a month costs")[0]
    assert set(re.findall(r"--[a-z][a-z-]+", page)) - {"--rate"} <= options  # `leasehold dev` has a rate, too


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_pages_contain_no_laboratory_notes(page: str) -> None:
    """A page for users contains no machine loads, goals or seeds."""
    assert LABORATORY_PHRASES.findall((DOCS / page).read_text(encoding="utf-8")) == []
