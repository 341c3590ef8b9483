"""Tests that `leasehold plan` runs the example in its help, accepts every field, and reports all bad input."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import asdict, fields
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from leasehold.adapters.cli.plan import EXAMPLE, app
from leasehold.adapters.json_form import (
    FORMS,
    JSON_NAMES,
    RULES,
    BadJsonField,
    format_action_json,
    format_lease_json,
    parse_plan_request,
    plan_from_json,
)
from leasehold.balancer.actions import (
    Action,
    Claim,
    Create,
    Delete,
    Look,
    Release,
    Renew,
    RequestHandoff,
    Steal,
)
from leasehold.balancer.config import RULE_SETS, Config
from leasehold.balancer.model import Bulletin, BulletinState, History, Hole, Lease, Me, Shard, at_timestamp
from leasehold.testing import leases, workers

ROOT = Path(__file__).parents[2]
LEASE: dict[str, Any] = {"key": "s-0", "owner": "a-1", "idle": 2.5, "version": "17", "checkpoint": "17", "sub": 2}
SHARD: dict[str, Any] = {"id": "s-0", "parents": [], "hash_range": ["0", "99"], "open": True}
WHOLE: dict[str, Any] = {
    "leases": [LEASE, {"key": "s-1", "owner": None, "idle": None, "version": "0"}],
    "shards": [SHARD, SHARD | {"id": "s-1", "hash_range": ["100", "199"]}],
    "me": {"worker": "b-1", "turn": 4},
    "config": {"rules": "kcl", "lease_seconds": 10, "initial_position": "LATEST", "max_leases": 100, "max_steals": 1},
}


def run_plan(document: object) -> dict[str, Any]:
    return plan_from_json(json.dumps(document).encode())


def test_the_example_of_the_help_is_correct() -> None:
    command = [sys.executable, "-c", "from leasehold.adapters.cli.main import run; run()", "plan"]
    example, _, expected_output = EXAMPLE.partition("<<'END'")[2].partition("END")
    completed = subprocess.run(command, input=example, capture_output=True, text=True, cwd=ROOT, check=False)
    expected_document = json.loads(expected_output.partition("\n\n")[0])
    assert (completed.returncode, json.loads(completed.stdout), completed.stderr) == (0, expected_document, "")


def test_a_request_with_all_fields_is_accepted() -> None:
    assert run_plan(WHOLE) == {
        "actions": [{"do": "claim", "key": "s-1", "rule": "K5"}],
        "look_again_seconds": 20.05,
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "input: not a JSON document"),
        ("[]", "input: [] is not an object"),
        (json.dumps(WHOLE | {"lease": []}), "lease: unknown field"),
    ],
)
def test_an_invalid_request_exits_2_with_one_line(text: str, complaint: str) -> None:
    result = CliRunner().invoke(app, input=text)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"leasehold plan: {complaint}")


@pytest.mark.parametrize(
    ("where", "value", "complaint"),
    [
        ("leases", {}, "leases: {} is not a list"),
        ("leases.0", 3, "leases[0]: 3 is not an object"),
        ("leases.0.key", "", 'leases[0].key: "" is not a name'),
        ("leases.0.key", None, "leases[0].key: null is not a string"),
        ("leases.0.owner", 7, "leases[0].owner: 7 is not a string"),
        ("leases.0.idle", "1", 'leases[0].idle: "1" is not a number'),
        ("leases.0.idle", -1, "leases[0].idle: -1 is not between 0 and 1e+12"),
        ("leases.0.idle", True, "leases[0].idle: true is not a number"),
        ("leases.0.version", 17, "leases[0].version: 17 is not a string"),
        ("leases.0.checkpoint", "HERE", 'leases[0].checkpoint: "HERE" is not one of'),
        ("leases.0.sub", 1.5, "leases[0].sub: 1.5 is not a whole number"),
        ("leases.0.parents", "s-9", 'leases[0].parents: "s-9" is not a list'),
        ("leases.0.notes", {"a": 1}, "leases[0].notes.a: 1 is not a string"),
        ("leases.0.colour", "red", "leases[0].colour: unknown field"),
        ("leases.1.key", "s-0", "leases[1].key: 's-0' was given before"),
        ("shards.0.hash_range", ["9", "1"], 'shards[0].hash_range: ["9", "1"] is not a first and a last'),
        ("shards.0.hash_range", ["0", str(2**128)], "shards[0].hash_range[1]: "),
        ("shards.0.open", "yes", 'shards[0].open: "yes" is not true or false'),
        ("shards.1.id", "s-0", "shards[1].id: 's-0' was given before"),
        ("me", {}, "me.worker: is missing"),
        ("shards.0.hash_range", ["0", "1", "2"], 'shards[0].hash_range: ["0", "1", "2"] is not a first and a last'),
        ("shards.0.hash_range", ["\N{SUPERSCRIPT TWO}", "9"], "shards[0].hash_range[0]: "),
        ("shards.0.hash_range", ["0", "9" * 5000], "shards[0].hash_range[1]: "),
        ("me.turn", True, "me.turn: true is not a whole number"),
        ("me.history", {"holes": [{"first": "0", "last": "1", "times": 0}]}, "me.history.holes[0].times: 0 is not"),
        ("at", 1.5, "at: unknown field"),
        ("config.rules", 5, "config.rules: 5 is not one of"),
        ("me.turn", -1, "me.turn: -1 is not between 0 and 1e+12"),
        ("config.rules", "fair", 'config.rules: "fair" is not one of kcl, kcl-rust, event-hubs, minimal'),
        ("config.max_leases", 0, "config.max_leases: 0 is not a whole number of at least 1"),
        ("config.max_steals", None, "config.max_steals: None is not a whole number of at least 1"),
        ("config.lease_seconds", 0, "config.lease_seconds: 0.0 is not a number above 0"),
        ("config.patience", 3, "config.patience: unknown field"),
        ("config.initial_position", "SHARD_END", 'config.initial_position: "SHARD_END" is not one of'),
        ("config.initial_position", "AT_TIMESTAMP", "config.timestamp_ms: is missing"),
        ("config.timestamp_ms", 5, "config.timestamp_ms: unknown field"),
    ],
)
def test_an_error_names_the_lease_and_the_field(where: str, value: object, complaint: str) -> None:
    document = json.loads(json.dumps(WHOLE))
    *path, last_key = where.split(".")
    node = document
    for step in path:
        node = node[int(step) if step.isdigit() else step]
    node[int(last_key) if last_key.isdigit() else last_key] = value
    with pytest.raises(BadJsonField) as error:
        run_plan(document)
    assert str(error.value).startswith(complaint)


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"rules": "kcl", "very_old_multiplier": 0, "max_leases": None}, "K7"),
        ({"rules": "kcl-rust", "leases_to_acquire": 3, "max_leases": 4}, "R1"),
        ({"rules": "event-hubs", "dialect": "gist", "mode": "greedy"}, "E6"),
        ({"rules": "event-hubs", "dialect": "java"}, "E5"),
        ({"rules": "event-hubs"}, "E4"),
        (
            {
                "rules": "minimal",
                "groups": ["/", "-"],
                "expected_workers": 2,
                "max_leases": 9,
                "max_steals": 1,
                "patience": 2,
                "grace_seconds": 0,
            },
            "M5",
        ),
        ({"groups": "prefix", "renew_seconds": 5, "cycle_seconds": 9}, "M5"),
    ],
)
def test_every_rule_set_and_option_can_be_selected(config: dict[str, Any], rule: str) -> None:
    (action,) = run_plan(WHOLE | {"config": config})["actions"]
    assert (action["do"], action["key"], action["rule"]) == ("claim", "s-1", rule)


LEASE_SEEN = Lease("s-0", owner="v", parents=("p",), checkpoint=at_timestamp(5))


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (
            Create(LEASE_SEEN, "L3"),
            {"do": "create", "checkpoint": "AT_TIMESTAMP", "timestamp_ms": 5, "parents": ["p"]},
        ),
        (Renew(LEASE_SEEN, "K10"), {"do": "renew"}),
        (Claim(LEASE_SEEN, "K7"), {"do": "claim"}),
        (
            Steal(LEASE_SEEN, "v", "M5", alternates=(Claim(Lease("s-1"), "M5"),)),
            {"do": "steal", "from": "v", "alternates": [{"do": "claim", "key": "s-1", "rule": "M5"}]},
        ),
        (RequestHandoff(LEASE_SEEN, "v", "H2"), {"do": "request-handoff", "from": "v"}),
        (
            RequestHandoff(
                LEASE_SEEN, "v", "H2", stale_next_owner="c", alternates=(RequestHandoff(Lease("s-1"), "w", "H2"),)
            ),
            {
                "do": "request-handoff",
                "from": "v",
                "stale_heir": "c",
                "alternates": [{"do": "request-handoff", "key": "s-1", "rule": "H2", "from": "w"}],
            },
        ),
        (
            Claim(LEASE_SEEN, "M5", alternates=(Claim(Lease("s-1"), "M5"),)),
            {"do": "claim", "alternates": [{"do": "claim", "key": "s-1", "rule": "M5"}]},
        ),
        (Renew(LEASE_SEEN, "C2", annotations=(("call", "x"),)), {"do": "renew", "notes": {"call": "x"}}),
        (Release(LEASE_SEEN, "C6"), {"do": "release"}),
        (
            Create(Lease("s-0", stream="orders"), "L4"),
            {"do": "create", "checkpoint": "TRIM_HORIZON", "parents": [], "stream": "orders"},
        ),
        (Release(LEASE_SEEN, "H3", next_owner="b"), {"do": "release", "to": "b"}),
        (Delete(LEASE_SEEN, "L8"), {"do": "delete"}),
    ],
    ids=lambda each: each["do"] if isinstance(each, dict) else "",
)
def test_every_action_has_a_json_form(action: Action, expected: dict[str, Any]) -> None:
    """The JSON also contains the former or the next owner, because a caller needs it to carry out the action."""
    assert format_action_json(action) == {"key": "s-0", "rule": action.rule} | expected


def test_a_worker_led_by_a_leader_gets_its_share() -> None:
    """A program that plans with this command also releases leases for workers that a leader leads (M14)."""
    leases = [{"key": f"s-{number}", "owner": "b-1", "version": "1"} for number in range(2)]
    me = {"worker": "b-1", "history": {"led": {"java": 4.5}}}
    response = run_plan({"leases": leases, "me": me, "config": {"rules": "minimal"}})
    assert response["actions"] == [{"do": "release", "key": "s-1", "rule": "M14", "to": "java"}]


def test_a_fault_that_stops_a_stream_is_reported() -> None:
    shards = [SHARD, SHARD | {"id": "s-1", "parents": ["s-0"]}]
    (problem,) = run_plan(WHOLE | {"shards": shards, "leases": []})["problems"]
    assert (problem["shard"], problem["what"][:20]) == ("s-0", "is open but has a ch")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just("s-0"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_no_document_ends_in_a_traceback(data: st.DataObject) -> None:
    document = json.loads(json.dumps(WHOLE))
    for _ in range(data.draw(st.integers(1, 3))):
        node: Any = document
        while isinstance(node, dict | list) and node:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = data.draw(st.sampled_from(keys))
            if not (isinstance(node[key], dict | list) and node[key]) or data.draw(st.booleans()):
                node[key] = data.draw(json_values)
                break
            node = node[key]
    _planned_or_rejected(json.dumps(document).encode())


def test_an_unknown_field_is_reported_in_one_line() -> None:
    """A name with a line break or terminal escapes cannot forge or hide parts of the message."""
    with pytest.raises(BadJsonField, match=r"^a\\nb\\x1b\[2J: unknown field$"):
        run_plan(WHOLE | {"a\nb\x1b[2J": 1})


@given(st.binary() | st.text().map(str.encode))
def test_no_bytes_end_in_a_traceback(text: bytes) -> None:
    _planned_or_rejected(text)


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"leases":' + b"9" * 5000 + b"}", b'{"me":1,"me":2}', b"\xff\xfe", b""]
)
def test_hostile_documents_are_rejected(text: bytes) -> None:
    """Deep nesting, huge numbers, duplicate fields and invalid text are reported as bad input, not as bugs."""
    with pytest.raises(BadJsonField):
        plan_from_json(text)


def _planned_or_rejected(text: bytes) -> None:
    try:
        response = plan_from_json(text)
    except BadJsonField as refused:
        output = str(refused)
    else:
        output = f"{json.dumps(response, allow_nan=False)}"
    assert ":" in output
    assert "\n" not in output


WRITTEN = {
    Lease: {"checkpoint"},  # written together with `sub` and `token`
    Config: {"rules", "initial_position"},  # written with the rule set's options, and with `timestamp_ms`
    Hole: {"stream"},  # may be missing
}


@pytest.mark.parametrize("kind", [*FORMS])
def test_every_field_of_the_planner_has_a_json_form(kind: type) -> None:
    """If a field had no JSON form, programs in other languages could not set it, and would get different plans."""
    assert set(FORMS[kind]) | WRITTEN.get(kind, set()) == {
        JSON_NAMES.get(attribute.name, attribute.name) for attribute in fields(kind) if attribute.init
    }


def test_every_rule_set_has_a_json_form() -> None:
    assert {*RULES.values()} == {*RULE_SETS}
    assert {*FORMS} == {Lease, Shard, Hole, Bulletin, BulletinState, History, Me, Config, *RULES.values()}


@given(leases(), workers())
def test_a_written_document_is_read_back_unchanged(table: tuple[Lease, ...], me: Me) -> None:
    """`leases --json` and programs in other languages write this form. If a field were lost, the plan would change."""
    history = asdict(me.history) | {name: dict(getattr(me.history, name)) for name in ("gaps", "paces", "led")}
    for hole in history["holes"]:
        hole |= {"first": str(hole["first"]), "last": str(hole["last"])}
    document = {
        "leases": [format_lease_json(lease) for lease in table],
        "me": {"worker": me.worker, "turn": me.turn, "history": _replace_infinity(history)},
    }
    parsed_request = parse_plan_request(json.dumps(document).encode())
    assert (parsed_request.leases, parsed_request.me) == (table, me)


def _replace_infinity(value: Any) -> Any:  # noqa: ANN401  any part of a document
    if isinstance(value, dict):
        return {name: _replace_infinity(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_infinity(item) for item in value]
    return None if value == math.inf else value


def test_a_partial_table_is_planned_as_in_python() -> None:
    """After a read of only a few rows, no lease may be taken. The JSON form once lost this, and planned steals."""
    rows = [{"key": f"s-{n}", "owner": "a", "idle": 0} for n in range(6)]
    me = {"worker": "b", "history": {"full_still": 1, "paces": {"a": 3}, "hearing": None}}
    assert [action["do"] for action in run_plan({"leases": rows, "me": {"worker": "b"}})["actions"]] == ["steal"]
    assert run_plan({"leases": rows, "me": me})["actions"] == []


def test_a_look_contains_every_field_of_pythons() -> None:
    rows = [
        {"key": f"s-{n}", "owner": worker, "idle": 1, "notes": {"process": f"p/{worker}"}}
        for n, worker in enumerate("ab")
    ]
    plans = [
        run_plan({"leases": rows, "me": {"worker": worker, "history": {"hearing": {}, "full_still": 1}}})
        for worker in ("a", "b")
    ]
    response = {name: value for plan_output in plans for name, value in plan_output.items()}
    assert set(response) == {"actions"} | {
        f"look_again_{JSON_NAMES.get(attribute.name, attribute.name)}" for attribute in fields(Look)
    }


def test_the_output_of_leases_plus_a_worker_is_a_request() -> None:
    """The two commands can be connected by a pipe, without a script in between."""
    listing = {"at": 1.5, "leases": [LEASE | {"owner": None, "idle": None}], "malformed": [], "trouble": "slow"}
    text = json.dumps(listing).encode()
    assert [action["do"] for action in plan_from_json(text, "b-1")["actions"]] == ["claim"]
    for document, worker, complaint in (
        (listing, None, "me: is missing"),
        (listing | {"me": {"worker": "c"}}, "b-1", "me: the document names"),
        (listing, "", '--worker: "" is not a name'),
    ):
        with pytest.raises(BadJsonField, match=complaint):
            plan_from_json(json.dumps(document).encode(), worker)


def test_a_document_of_a_thousand_levels_is_rejected() -> None:
    """A document may be shallow enough to be parsed, but too deep to be formatted. This must not cause a traceback."""
    for levels in range(900, 1000):
        with pytest.raises(BadJsonField, match=r"leases.*is not|recursion"):
            plan_from_json(b'{"leases":' + b"[" * levels + b"]" * levels + b"}")


def test_times_in_milliseconds_are_accepted() -> None:
    """A time since 1970 has thirteen digits, in the configuration as well as in a checkpoint."""
    config = {"initial_position": "AT_TIMESTAMP", "timestamp_ms": 1_700_000_000_000}
    (created,) = run_plan({"leases": [], "shards": [SHARD], "me": {"worker": "a"}, "config": config})["actions"]
    assert (created["checkpoint"], created["timestamp_ms"]) == ("AT_TIMESTAMP", 1_700_000_000_000)
    lease = {"key": "s-0", "checkpoint": "AT_TIMESTAMP", "sub": 1_700_000_000_000}
    (parsed_lease,) = parse_plan_request(json.dumps({"leases": [lease], "me": {"worker": "a"}}).encode()).leases
    assert parsed_lease.checkpoint == at_timestamp(1_700_000_000_000)


@pytest.mark.parametrize("document", [{}, {"config": {}}, {"config": {"rules": "minimal"}}])
def test_defaults_of_a_configuration_are_those_of_python(document: dict[str, Any]) -> None:
    text = json.dumps({"leases": [], "me": {"worker": "a"}} | document).encode()
    assert parse_plan_request(text).config == Config()


def test_pairs_are_sorted_by_name() -> None:
    """Documents that differ only in the order of their fields give the same plan."""
    lease = {"key": "s-0", "notes": {"process": "p/a", "call": "x"}}
    history = {"gaps": {"b": 1, "a": 2}, "led": {"k": None, "j": 3}}
    request = parse_plan_request(json.dumps({"leases": [lease], "me": {"worker": "a", "history": history}}).encode())
    assert request.leases[0].annotations == (("call", "x"), ("process", "p/a"))
    assert (request.me.history.gaps, request.me.history.led) == ((("a", 2), ("b", 1)), (("j", 3), ("k", math.inf)))


def test_shard_with_a_single_hash_key_is_accepted() -> None:
    shard = SHARD | {"hash_range": ["7", "7"]}
    request = parse_plan_request(json.dumps({"leases": [], "shards": [shard], "me": {"worker": "a"}}).encode())
    assert request.shards is not None
    assert request.shards[0].hash_range == (7, 7)


def test_faults_of_every_stream_are_reported() -> None:
    shards = [
        shard | {"stream": stream, "id": f"{stream}:{shard['id']}", "parents": [f"{stream}:s-0"] * (shard != SHARD)}
        for stream in ("bills", "orders")
        for shard in (SHARD, SHARD | {"id": "s-1"})
    ]
    document = {"leases": [], "shards": shards, "me": {"worker": "a"}}
    assert [problem["stream"] for problem in run_plan(document)["problems"]] == ["bills", "orders"]
