"""The site's search finds the right page for the words that readers type."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
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
}
"""What is typed, and the pages of which one must come first."""
AT_LEAST = 30


@pytest.fixture(scope="module")
def firsts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Return the first page that the theme's own search finds for each term."""
    site = tmp_path_factory.mktemp("site")
    build = (sys.executable, "-m", "mkdocs", "build", "-q", "--site-dir", str(site))
    subprocess.run(build, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    search = (*find_node().node, str(Path(__file__).with_name("search.mjs")), str(site))
    typed = "\n".join(TERMS)
    results = subprocess.run(search, input=typed, capture_output=True, text=True, check=True).stdout.splitlines()
    pages = [(json.loads(line) or [""])[0].partition("#")[0].rstrip("/") for line in results]
    return dict(zip(TERMS, pages, strict=True))


def test_what_readers_type_finds_the_right_page_first(firsts: Mapping[str, str]) -> None:
    """At least 30 of the 34 terms find a page that answers them as the first result."""
    wrong = {term: page for term, page in firsts.items() if page not in TERMS[term]}
    assert len(TERMS) - len(wrong) >= AT_LEAST, wrong


def test_no_page_has_hidden_keywords() -> None:
    """Pages are found by the words that readers see: no page has tags, boosts or keywords in its front matter."""
    heads = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
    fronts = {name: text.split("---")[1] for name, text in heads.items() if text.startswith("---")}
    assert [
        name for name, front in fronts.items() if any(word in front for word in ("tags", "boost", "keywords"))
    ] == []
