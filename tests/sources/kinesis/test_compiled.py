"""The compiled codec returns the same results as the one in plain Python."""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aggregation_rows import ROWS, Rows
from crafted import cases
from fuzz_aggregation import mutated

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from compiled import plain_and_compiled
from hypothesis import HealthCheck, given, settings

import hatch_build
from leasehold.adapters.sources.protocol import Record
from leasehold.balancer.model import HASH_KEYS, HashRange

pytestmark = pytest.mark.more
Forms = dict[str, dict[str, ModuleType]]


@pytest.fixture(scope="module")
def forms() -> Iterator[Forms]:
    """Yield the modules of the codec, in plain and in compiled form."""
    with plain_and_compiled() as modules_by_form:
        if "compiled" not in modules_by_form:
            pytest.skip("the codec is not compiled: no compiler")
        yield modules_by_form


def test_codec_compiles_in_an_isolated_build(forms: Forms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels are built in isolation. If the compilation fails there, the build only logs a warning."""
    assert "compiled" in forms
    monkeypatch.setattr(hatch_build, "CHECKED", (*hatch_build.CHECKED, "--no-site-packages"))
    assert len(hatch_build.compile_to(tmp_path)) == len(hatch_build.HOT) + 2  # and the shared and the C module


def _said(user_records: Any) -> tuple[object, ...]:  # noqa: ANN401  each form has its own classes
    return user_records.rows, list(user_records.subs), str(user_records.reason), user_records.dropped


def test_each_form_names_itself(forms: Forms) -> None:
    assert {name: form["wire"].COMPILED for name, form in forms.items()} == {
        "plain": False,
        "compiled": True,
    }


@pytest.mark.parametrize("misplaced", ["keep", "drop"])
def test_both_forms_decode_alike(forms: Forms, misplaced: str) -> None:
    for case in (*cases(), *mutated(5000, seed=9)):
        plain, compiled = (
            _said(forms[form]["decode"].deaggregate(case.data, "k", None, (case.first, case.last), misplaced=misplaced))
            for form in ("plain", "compiled")
        )
        assert compiled == plain, case.name


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS)
def test_both_forms_encode_alike(forms: Forms, rows: Rows) -> None:
    encoded = []
    for form in ("plain", "compiled"):
        aggregate = forms[form]["encode"].Aggregate(2000)
        add_results = [aggregate.add(data, key, hash_key) for key, hash_key, data in rows]
        encoded.append((add_results, aggregate.size, aggregate.encode() if aggregate.count else b""))
    assert encoded[0] == encoded[1]


def test_both_forms_read_placed_records_alike(forms: Forms) -> None:
    for case in (*cases(), *mutated(2000, seed=12)):
        results = []
        for form in ("plain", "compiled"):
            places_module, sizes = forms[form]["places"], (4, len(case.data) - 16)
            layout = places_module.locate(case.data, *sizes)
            records = layout and places_module.LocatedRecords(case.data, *layout, number="7", arrived=1.5)
            results.append(
                records and (len(records), [*records], [*records[1:-1]], [type(record) for record in records])
            )
        assert results[0] == results[1], case.name


@pytest.mark.parametrize("hash_range", [None, HASH_KEYS, (0, 2**127), (2**127, HASH_KEYS[1])])
@pytest.mark.parametrize("misplaced", ["keep", "drop"])
def test_both_forms_measure_alike(forms: Forms, hash_range: HashRange | None, misplaced: str) -> None:
    records = [case.data for case in (*cases(), *mutated(2000, seed=10)) if len(case.data) < 10_000]
    batches = [
        forms[form]["arrow"].deaggregate_to_arrow(records, None, hash_range, misplaced=misplaced)
        for form in ("plain", "compiled")
    ]
    assert batches[0].equals(batches[1])


def test_c_scanner_rejects_views_outside_the_response(forms: Forms) -> None:
    scan = forms["compiled"]["scan"]
    view_beyond_end = struct.pack("<iiii", 20, 0, 0, 90)
    for views, fault in (
        ((view_beyond_end,) * 3, IndexError),
        ((b"\xff" * 16,) * 3, IndexError),
        ((b"",) * 3, ValueError),
    ):
        with pytest.raises(fault):
            scan.columns(b"x" * 100, *views, bytes(8))
    for wrong_arguments in ((), (tuple,), (int, *[[]] * 7), (Record, *[()] * 7)):
        with pytest.raises(TypeError):
            scan.records(*wrong_arguments)


def test_records_made_in_c_are_records(forms: Forms) -> None:
    scan = forms["compiled"]["scan"]
    columns = [b"x", b"y"], ["1", "2"], [0, 0], ["k", None], [None, "7"], [1.5, None], [False, True]
    records = [*scan.records(Record, *columns)]
    assert records == [Record(*row) for row in zip(*columns, strict=True)]
    assert {type(record) for record in records} == {Record}
    records[0].data, records[1].position
    iterator = scan.records(Record, *columns)
    next(iterator)
    columns[0].pop()
    assert [*iterator] == []
