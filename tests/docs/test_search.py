"""Tests that the site's search finds the right page for the words that readers type."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from pages import ROOT

from leasehold_lab.standins.node import find_node

pytestmark = [pytest.mark.more, pytest.mark.slow]

TERMS: Mapping[str, tuple[str, ...]] = {
    "ordering": ("handlers",),
    "reprocess": ("slices",),
    "alerts": ("metrics",),
    "FastAPI": ("asyncio",),
    "logging": ("logging",),
    "exceptions": ("handlers", "reference"),
    "options": ("options",),
    "Windows": ("guarantees",),
    "batch size": ("batch-size",),
    "back pressure": ("batch-size",),
    "graceful shutdown": ("running",),
    "local development": ("local-development",),
    "multi-region": ("regions",),
    "idempotent": ("exactly-once",),
    "replay from timestamp": ("slices",),
    "lag": ("steering", "metrics"),
    "checkpoint": ("handlers",),
    "exactly once": ("exactly-once",),
    "scaling": ("limits", "autoscaling"),
    "cost": ("choosing-a-store",),
    "enhanced fan-out": ("fan-out",),
    "poison": ("dead-letters",),
    "dead letter": ("dead-letters",),
    "Kubernetes": ("running",),
    "metrics": ("metrics",),
    "cross-account": ("regions",),
    "unit test": ("test-handler",),
    "asyncio": ("asyncio",),
    "migrate from KCL": ("from-java-kcl",),
    "EMR": ("spark-cluster",),
    "Databricks": ("spark-cluster",),
    "permissions": ("rights",),
    "duplicates": ("exactly-once",),
    "notebook": ("asyncio",),
    "Django": ("asyncio",),
    "upgrade": ("running",),
    "VPC": ("network",),
    "encryption": ("network",),
    "environment variables": ("network",),
    "TRIM_HORIZON": ("kinesis",),
    "rewind": ("steering",),
    "hot shard": ("limits",),
    "health check": ("running",),
    "commit offset": ("glossary",),
    "mypy": ("reference",),
    "dead worker": ("limits",),
    "start position": ("kinesis",),
    "rate limit": ("kinesis",),
    "aggregation": ("kinesis",),
}
"""Search terms, each with the pages that answer it. One of these pages must be the first result."""
AT_LEAST = 45

QUESTIONS: Mapping[str, tuple[str, str]] = {
    "lag": ("steering", "`leasehold leases STORE` shows the lag of each lease"),
    "checkpoint frequency": ("handlers", "at most once a second"),
    "exactly once": ("exactly-once", "This is enough for most consumers"),
    "ordering per key": ("handlers", "so records of one partition key do too"),
    "scaling to N shards": ("limits", "add workers, up to the number of open shards"),
    "cost": ("choosing-a-store", "At list prices, leases in DynamoDB cost about"),
    "enhanced fan-out": ("fan-out", "Choose fan-out if three or more applications read the stream"),
    "reprocess from a time": ("slices", "--from 2026-11-21T00:00Z --until"),
    "poison records": ("dead-letters", "That record is stored as a dead letter, and the shard continues after it"),
    "graceful shutdown in Kubernetes": ("running", "must be at least `--drain-seconds` plus 5 s"),
    "metrics and alerts": ("metrics", "alarms/prometheus.yml"),
    "multi-region": ("regions", "Run one group per region"),
    "cross-account": ("regions", "The stream is read as the role"),
    "testing my handler": ("test-handler", "test it with a `Record` made by hand"),
    "asyncio and FastAPI": ("asyncio", "FastAPI takes the same function"),
    "batch size": ("batch-size", "A batch is what one read of a shard returns"),
    "back pressure": ("batch-size", "reading waits for it, and nothing is lost"),
    "from KCL without loss": ("from-java-kcl", "Replace Java workers one by one"),
    "Spark on EMR": ("spark-cluster", "a release with Spark 4.0 or later"),
    "local development": ("local-development", "prints\nwhat to paste"),
}
"""Questions of users, as they type them, each with the page that must come first and a piece of the answer on it."""
READING = 300
"""The greatest number of words from the place to which the search leads to the end of the answer."""
ANSWERED = 19


@pytest.fixture(scope="module")
def firsts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Return the location of the first result for each term. The search is that of the site's theme."""
    site = tmp_path_factory.mktemp("site")
    build_command = (sys.executable, "-m", "mkdocs", "build", "-q", "--site-dir", str(site))
    subprocess.run(build_command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    search_command = (*find_node().node, str(Path(__file__).with_name("search.mjs")), str(site))
    terms = [*{**TERMS, **QUESTIONS}]
    search_input = "\n".join(terms)
    results = subprocess.run(
        search_command, input=search_input, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return dict(zip(terms, [(json.loads(line) or [""])[0] for line in results], strict=True))


def page_of(location: str) -> str:
    """Return the page that a result leads to."""
    return location.partition("#")[0].rstrip("/")


def _anchor(heading: str) -> str:
    """Return the anchor that the site gives a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def _keep_code_with(answer: str) -> Callable[[re.Match[str]], str]:
    """Return a replacement function for code blocks that removes a block unless it contains the answer."""
    return lambda block: block[0] if answer in block[0] else ""


def words_until(location: str, answer: str) -> int | None:
    """Return the number of words to the end of the answer, without code blocks, or None if there is no answer."""
    text = (ROOT / "docs" / f"{page_of(location) or 'index'}.md").read_text(encoding="utf-8")
    sections = re.split(r"(?m)^(?=#+ )", re.sub(r"(?m)^```(?:sh|python)\n(.*\n)*?```$", _keep_code_with(answer), text))
    anchor = location.partition("#")[2]
    section_numbers = [number for number, section in enumerate(sections) if _anchor(section.split("\n")[0]) == anchor]
    text_before, answer_found, _ = "".join(sections[section_numbers[0] if section_numbers else 0 :]).partition(answer)
    return len(text_before.split()) + len(answer.split()) if answer_found else None


def test_search_terms_find_the_right_page_first(firsts: Mapping[str, str]) -> None:
    """For at least `AT_LEAST` terms, the first result is a page that answers them."""
    pages = {term: page_of(firsts[term]) for term in TERMS}
    wrong_pages = {term: page for term, page in pages.items() if page not in TERMS[term]}
    assert len(TERMS) - len(wrong_pages) >= AT_LEAST, wrong_pages


def test_questions_are_answered_on_the_first_page_found(firsts: Mapping[str, str]) -> None:
    """At least `ANSWERED` questions are answered on the first page found, within `READING` words."""
    words = {
        question: words_until(firsts[question], answer) if page_of(firsts[question]) == page else None
        for question, (page, answer) in QUESTIONS.items()
    }
    answered_questions = [question for question, count in words.items() if count is not None and count < READING]
    assert len(answered_questions) >= ANSWERED, (words, firsts)


def test_no_page_has_hidden_keywords() -> None:
    """Only the words that readers see lead to a page. No page has tags, boosts or keywords in its front matter."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
    front_matters = {name: text.split("---")[1] for name, text in texts.items() if text.startswith("---")}
    assert [
        name
        for name, front_matter in front_matters.items()
        if any(word in front_matter for word in ("tags", "boost", "keywords"))
    ] == []
