"""Every parser returns a result or a documented error for any input, and every parser is in the list."""

import ast
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_targets import TARGETS, TRUSTED
from fuzzing import CORPUS, FuzzTarget, is_accepted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HOMES = {ROOT / "leasehold": "**/*.py", ROOT / "lab": "leasehold_lab/**/*.py"}
EXAMPLES = 40
MEMORY_KIB = 256 << 10

DECODERS = {
    *("b64decode", "deaggregate", "fromisoformat", "fromtimestamp", "iter_unpack", "loads", "parse_connection_string"),
    *("parse_qs", "parse_qsl", "parse_timestamp", "parsedate_to_datetime", "split_url", "strptime", "unpack_from"),
    *("unpack", "unquote", "urlsplit"),
}
"""Functions that make something of what came from outside: who calls one is a parser."""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_no_value_surprises_a_parser(target: FuzzTarget) -> None:
    """One odd row, blob, record, response or option does not stop its readers."""
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    acceptances = [is_accepted(target, value) for value in target.replay()]
    assert any(acceptances), "no sample is accepted, so that nothing but refusals is tried"

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def near_the_samples(data: st.DataObject) -> None:
        is_accepted(target, data.draw(target_values))

    target_values = target.values
    near_the_samples()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before < MEMORY_KIB


def test_every_target_has_a_corpus_and_a_name_of_its_own() -> None:
    """A target without samples would try only noise, and a corpus without a target nothing."""
    names = [target.name for target in TARGETS]
    assert sorted(names) == sorted(path.stem for path in CORPUS.iterdir())


def test_every_module_that_parses_is_fuzzed_or_trusted_for_a_reason() -> None:
    """No new parser meets its first hostile value in production."""
    parsers = {
        path.relative_to(home).as_posix()
        for home, files in HOMES.items()
        for path in home.glob(files)
        if any(_decoding(path))
    }
    covered_modules = {module for target in TARGETS for module in target.covers}
    assert parsers - covered_modules - TRUSTED.keys() == set(), "put these into lab/fuzz/fuzz_targets.py"
    assert {
        name for name in covered_modules | TRUSTED.keys() if not any((home / name).exists() for home in HOMES)
    } == set()
    assert TRUSTED.keys() - parsers == covered_modules & TRUSTED.keys() == set()


def _decoding(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in DECODERS and (name != "loads" or isinstance(node.func, ast.Attribute)):
                yield name
