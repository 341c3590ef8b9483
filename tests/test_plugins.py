"""Tests that other distributions can add stores, sources, rule sets and commands by entry points."""

import json
import os
import subprocess
import sys

import pytest

ENTRY_POINTS = """
[leasehold.stores]
acme = acme.leases
memory = acme.leases
[leasehold.sources]
acme = acme.stream
[leasehold.rules]
acme = acme.rules:Acme
[leasehold.commands]
acme = acme.command:app
plan = acme.command:app
"""
MODULES = {
    "leases": """
from leasehold.stores.embedded.memory import MemoryStore

OPTIONS = ("depth",)

def open_url(place, options, *, create, request_seconds):
    print("store", place, *options.items(), create, request_seconds)
    return MemoryStore()
""",
    "stream": """
def open_url(place, options):
    print("source", place, *options.items())
""",
    "rules": """
from attrs import frozen
from leasehold import Claim
from leasehold.planner import RuleSet

@frozen
class Acme(RuleSet):
    name = "acme"
    renewal_rule = "A0"
    eager: bool = True

    def take(self, census, me, config):
        return tuple(Claim(lease, "A1") for lease in census.available) if self.eager else ()
""",
    "command": """
import typer

app = typer.Typer()

@app.command()
def command(word: str) -> None:
    print("acme", word)
""",
}
QUESTION = {"leases": [{"key": "s-0"}], "me": {"worker": "a"}, "config": {"rules": "acme"}}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment variables of a process in which the distribution `acme-leases` is installed."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "acme").mkdir()
    for name, text in {"__init__": "", **MODULES}.items():
        (folder / "acme" / f"{name}.py").write_text(text)
    metadata = folder / "acme_leases-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-leases\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))}


def run_code(environment: dict[str, str], code: str, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run this code in the environment."""
    call = [sys.executable, "-c", code, *words]
    return subprocess.run(call, env=environment, input=stdin, capture_output=True, text=True, check=False)


def command(environment: dict[str, str], *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line in the environment."""
    return run_code(environment, "from leasehold.adapters.cli import run; run()", *words, stdin=stdin)


def test_entry_points_add_the_schemes_of_stores_and_sources(environment: dict[str, str]) -> None:
    """Another distribution's module opens the URLs of its schemes, whose options are checked. Our schemes stay ours."""
    output = run_code(
        environment,
        """
from leasehold.adapters import open_source
from leasehold.stores import open_store
open_store("acme://place?depth=3", request_seconds=2.5)
open_source("acme://place")
print(type(open_store("memory://place")).__module__)
for opened, url in ((open_store, "acme://place?dept=3"), (open_source, "acme://place?a=b"), (open_source, "acm://place")):
    try:
        opened(url)
    except ValueError as wrong:
        print(wrong)
""",
    )
    assert output.stdout.splitlines() == [
        "store place ('depth', '3') True 2.5",
        "source place",
        "leasehold.stores.embedded.memory",
        "store URL: unknown option 'dept'; choose among depth; did you mean 'depth'?",
        "source URL: unknown option 'a'; this source has none",
        (
            "source URL: unknown scheme 'acm'; choose one of acme, dynamodb-streams, eventhubs, kinesis; "
            "did you mean 'acme'?"
        ),
    ], output.stderr


def test_an_entry_point_adds_a_rule_set_to_commands_and_simulator(environment: dict[str, str]) -> None:
    plan_result = command(environment, "plan", stdin=json.dumps(QUESTION))
    assert json.loads(plan_result.stdout)["actions"] == [{"do": "claim", "key": "s-0", "rule": "A1"}]
    assert "acme: eager" in command(environment, "plan", "--help").stdout
    output = run_code(environment, "from leasehold_lab.simulator.question import RULES; print(RULES['acme'])")
    assert output.stdout == "Acme(eager=True)\n"


def test_an_entry_point_adds_a_command(environment: dict[str, str]) -> None:
    """The command of another distribution is listed in the help, and can be run. It does not replace any of ours."""
    assert command(environment, "acme", "word").stdout == "acme word\n"
    help_text = command(environment, "--help").stdout
    assert "A command of acme-leases." in help_text
    assert "Usage: leasehold plan" in command(environment, "plan", "--help").stdout
    assert "Plan the actions of one worker" in help_text


def test_doctor_names_a_plugin_store_without_checks(environment: dict[str, str]) -> None:
    """For a store that the doctor cannot check, the error names the scheme, and the exit status is 2."""
    result = command(environment, "doctor", "kinesis://orders?region=eu-west-1", "--store", "acme://place")
    assert result.returncode == 2
    assert "doctor has no checks" in result.stderr
