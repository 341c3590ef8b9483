"""Tests that the site builds without warnings, is complete, and loads no files from other hosts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import fields_dict
from pages import ROOT

from leasehold import adapters, balancer, errors, stores
from leasehold.adapters.cli.main import COMMANDS
from leasehold.adapters.consumer.status import NUMBERS
from leasehold.adapters.json_form import RULES
from leasehold.adapters.ops.serving.app import METRIC_HELP
from leasehold.adapters.options import Options, ProduceOptions, options_by_name
from leasehold.adapters.sources import urls as source_urls
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.spark.event_hubs.options import EVENT_HUBS_SOURCE, HUB
from leasehold.adapters.spark.kinesis.options import KINESIS_SOURCE
from leasehold.adapters.spark.kinesis.sink import KINESIS_SINK
from leasehold.adapters.spark.kinesis.table_changes import DYNAMODB_SOURCE
from leasehold.adapters.spark.options import ALL_SOURCES
from leasehold.adapters.spark.sink import ALL_SINKS
from leasehold.balancer.config import Config
from leasehold.stores import urls as store_urls

pytestmark = pytest.mark.slow

LOADED_FROM_OTHER_HOST = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//[^"'> ]+"""
    r"""|<link[^>]*rel=["']?(?:stylesheet|preconnect|preload|icon)[^>]*href=["']?(?:https?:)?//[^"'> ]+"""
    r"""|(?:@import|url\()\s*["']?(?:https?:)?//[^"') ]+"""
)
"""Elements that a browser loads from another host without being asked."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site. A broken link, or a page that is in no menu, fails the build."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder))
    completed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    return folder


def test_every_page_is_built_and_in_the_menu(site: Path) -> None:
    front_page = (site / "index.html").read_text(encoding="utf-8")
    pages = sorted(path.stem for path in (ROOT / "docs").glob("*.md") if path.stem != "index")
    assert [name for name in pages if f'href="{name}/"' not in front_page] == []


def test_no_file_of_the_site_comes_from_another_host(site: Path) -> None:
    """Readers behind a firewall do not have to wait for fonts, and other hosts cannot track readers."""
    files = [path for path in site.rglob("*") if path.suffix in {".html", ".css"}]
    assert {
        match[0] for path in files for match in LOADED_FROM_OTHER_HOST.finditer(path.read_text(encoding="utf-8"))
    } == set()


def test_search_finds_only_user_pages(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    indexed_pages = {entry["location"].partition("#")[0].rstrip("/") for entry in index["docs"]}
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert indexed_pages == {"" if page == "index" else page for page in pages}


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    page = (site / "planner-reference" / "index.html").read_text(encoding="utf-8")
    public_names = [(package, name) for package in (balancer, stores, adapters) for name in package.__all__]
    anchors = set(re.findall(r'id="([\w.]+)"', page))
    # The anchors of `plan` and `execute` contain the name twice, because their modules have the same names.
    assert [
        name
        for package, name in public_names
        if not anchors & {f"{package.__name__}.{name}", f"{package.__name__}.{name}.{name}"}
    ] == []


def article_html(site: Path, page: str) -> str:
    """Return the HTML of a page's article, without the menus around it."""
    return (site / page / "index.html").read_text(encoding="utf-8").partition("<article")[2]


API_MODULE = "leasehold.adapters.api"
HANDLING = "leasehold.adapters.consumer.handling"
RECORD = "leasehold.adapters.sources.protocol.Record"


SCHEMES = {**source_urls._SCHEMES, **store_urls._SCHEMES}  # noqa: SLF001  the tables that URLs are read by
INSTRUMENTS = re.findall(
    r"""create_counter\("(\w+)"|WorkerMetrics\.(\w+),""",
    (ROOT / "leasehold" / "adapters" / "consumer" / "metrics.py").read_text(encoding="utf-8"),
)
ERROR_CLASSES = [item for item in vars(errors).values() if isinstance(item, type)]
SETTINGS_CLASSES: list[Any] = [Config, *RULES.values()]
SETTINGS = [name for kind in SETTINGS_CLASSES for name in fields_dict(kind) if name != "rules"]
SPARK_SOURCES, SPARK_SINKS = (
    [f"<code>{option.name}</code>" for table in tables for option in table if option.in_docs]
    for tables in (
        (ALL_SOURCES, KINESIS_SOURCE, DYNAMODB_SOURCE, EVENT_HUBS_SOURCE),
        (ALL_SINKS, KINESIS_SINK, HUB),
    )
)
DELIVERY = ("records", "behind_seconds", "shard", "stream", "epoch", "lost", "checkpoint")
REFERENCE = {
    "functions": ("reference", [f'id="{API_MODULE}.{name}"' for name in ("run", "arun", "worker", "read", "produce")]),
    "Delivery": ("reference", [f'id="{HANDLING}.Delivery.{name}"' for name in DELIVERY]),
    "Record": ("reference", [f'id="{RECORD}.{name}"' for name in Record._fields]),
    "errors": ("reference", [f'id="leasehold.errors.{item.__name__}"' for item in ERROR_CLASSES]),
    "options": (
        "options",
        [f"<code>{name}</code>" for table in (Options, ProduceOptions) for name in options_by_name(table)],
    ),
    "settings": ("options", [f"<code>{name}</code>" for name in SETTINGS]),
    "commands": ("command-line", [f'id="leasehold-{name}"' for name in COMMANDS]),
    "options of commands": (
        "command-line",
        ["<code>--dead-letter</code>", "<code>--add</code>", "<code>--rate</code>"],
    ),
    "schemes": ("urls", [f"<code>{scheme}://…</code>" for scheme in SCHEMES]),
    "URL options": ("urls", [f"<code>{option}</code>" for item in SCHEMES.values() for option in item.options]),
    "metrics": ("metrics", [f"<code>{counter or gauge}</code>" for counter, gauge in INSTRUMENTS]),
    "metrics of serve": ("metrics", [f"<code>{name}</code>" for name in METRIC_HELP]),
    "statuses": ("status", [f"<td>{word}</td>" for word in NUMBERS]),
    "dead-letter format": (
        "dead-letters",
        ["<code>sequence_number</code>", "<code>arrived_ms</code>", "<code>alone</code>"],
    ),
    "options of Spark sources": ("spark-options", SPARK_SOURCES),
    "options of Spark sinks": ("spark-writing", SPARK_SINKS),
    "lease rows": ("lease-rows", ["<code>leaseCounter</code>", "<code>ownerid</code>"]),
}
"""For each part of the reference, the page that has it, and the HTML that must be on the page."""


@pytest.mark.parametrize(("page", "parts"), REFERENCE.values(), ids=REFERENCE)
def test_the_reference_has_every_part(site: Path, page: str, parts: list[str]) -> None:
    """The page names everything that the code defines: parameters, options, commands, URLs, metrics and statuses."""
    text = article_html(site, page)
    assert [part for part in parts if part not in text] == []


def test_each_parameter_of_run_is_a_table_row(site: Path) -> None:
    """Each parameter of `run` has a row in a table, and is not only mentioned in a paragraph."""
    text = (
        article_html(site, "reference").partition(f'id="{API_MODULE}.run"')[2].partition(f'id="{API_MODULE}.arun"')[0]
    )
    assert [name for name in ("source", "handler", "leases", "options") if f"<code>{name}</code>" not in text] == []


def test_the_glossary_has_at_most_twenty_words(site: Path) -> None:
    """The second table, which has the words of other systems, is not counted."""
    words, _, _ = article_html(site, "glossary").partition("</table>")
    assert 10 <= words.count("<tr>") - 1 <= 20


def test_code_fits_the_page_and_every_picture_has_a_caption(site: Path) -> None:
    style = (site / "theme" / "leasehold.css").read_text(encoding="utf-8")
    assert "white-space: pre-wrap" in style
    assert re.search(r"\.language-text code \{[^}]*white-space: pre;", style)  # lines of drawings must not be wrapped
    assert 'class="language-text highlight"' in (site / "specs" / "architecture" / "index.html").read_text(
        encoding="utf-8"
    )
    uncaptioned_pages = []
    for page in site.rglob("*.html"):
        drawings = page.read_text(encoding="utf-8").split('<figure class="drawn">')[1:]
        for drawing in drawings:
            html_after_drawing = drawing.partition("</figure>")[2].lstrip()
            if not html_after_drawing.startswith("<p>What to see: "):
                uncaptioned_pages.append(page.parent.name)
    assert uncaptioned_pages == []


def test_the_animation_respects_reduced_motion(site: Path) -> None:
    """The animation stops for readers whose system settings ask for less motion."""
    home = (site / "index.html").read_text(encoding="utf-8")
    picture = home.partition('class="kill"')[2].partition("</svg>")[0]
    assert "@media (prefers-reduced-motion: reduce) { .kill .moving { animation: none; } }" in picture
    assert set(re.findall(r"animation-name: (kill-[\w-]+)", picture)) == set(
        re.findall(r"@keyframes (kill-[\w-]+)", picture)
    )
