"""Tests without a service that `leasehold doctor` finds problems before a fleet starts."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import evolve
from botocore.exceptions import ClientError
from object_memory import ObjectMemory
from typer.testing import CliRunner

from leasehold.adapters.cli.steer.doctor import app
from leasehold.adapters.inputs import with_event_hub_times
from leasehold.adapters.ops.doctor import examination
from leasehold.adapters.ops.doctor.attempts import (
    REQUEST_SECONDS,
    Absent,
    Finding,
    FindingState,
    NotTried,
    RightAttempt,
    RightsTrial,
    ServiceClock,
    clock_finding,
    compare_with_stream,
    has_no_wrong_finding,
    try_rights,
)
from leasehold.adapters.ops.doctor.embedded import memory_trial, sqlite_trial
from leasehold.adapters.ops.doctor.examination import (
    LIST_PRICES,
    Fleet,
    cost_finding,
    gap_finding,
    gap_seconds,
    loads,
    size_finding,
)
from leasehold.adapters.ops.doctor.objects import gcs_trial, s3_trial
from leasehold.adapters.sources import urls as sources
from leasehold.balancer.config import Config
from leasehold.balancer.model import SHARD_END, Lease, Shard
from leasehold.balancer.rules.kcl import Kcl
from leasehold.errors import OutcomeUnknown, SourceError, SourceUnavailable, StoreError
from leasehold.stores import urls as stores
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.embedded.sqlite import SqliteStore
from leasehold.stores.protocol import Done, Listing, Malformed, Outcome, Timeouts
from leasehold.stores.requests import ObjectFields
from leasehold.stores.writes import Write
from leasehold_lab.simulator.world.world import ListSource

SHARDS = (Shard("s-0", hash_range=(0, 4)), Shard("s-1", hash_range=(5, 9)))
ROWS = (Lease("s-0", owner="w-1", hash_range=(0, 4)), Lease("s-1"))


def attempt_that_raises(error: Exception, cause: Exception | None = None) -> RightAttempt:
    """Return an attempt to use a permission. The attempt raises this error."""

    def ask() -> str:
        raise error from cause

    return RightAttempt("x:Do", ask, writes=True)


def aws_rejection(code: str) -> ClientError:
    """Return a rejection from an AWS service."""
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 400}}, "Do")  # type: ignore[typeddict-item]


def try_attempts(*attempts: RightAttempt, read_only: bool = False) -> list[Finding]:
    trial = RightsTrial("table t", attempts, None, None, lambda: None)
    return list(try_rights(trial, read_only=read_only))


FINE = RightAttempt("x:Read", lambda: "allowed")


def test_a_denied_right_is_reported_and_the_others_are_tried() -> None:
    findings = try_attempts(attempt_that_raises(StoreError("t: no"), aws_rejection("AccessDeniedException")), FINE)
    assert findings == [
        Finding("x:Do", "wrong", "t: no", "allow x:Do"),
        Finding("x:Read", "ok", "table t: allowed"),
    ]
    assert not has_no_wrong_finding(findings)


class Refused(Exception):
    """Stands for the errors that the clients of PostgreSQL, Google and Azure raise for a rejected request."""

    def __init__(self, **told: object) -> None:
        self.__dict__.update(told)


@pytest.mark.parametrize(
    ("refused", "todo"),
    [
        (Refused(sqlstate="42501"), "allow x:Do"),
        (Refused(code=403), "allow x:Do"),
        (Refused(status_code=403), "allow x:Do"),
        (Refused(sqlstate="42P01", code=404, status_code=404), ""),
    ],
)
def test_a_rejection_of_each_service_is_recognized(refused: Refused, todo: str) -> None:
    assert try_attempts(attempt_that_raises(StoreError("t: no"), refused))[0].todo == todo


@pytest.mark.parametrize(
    ("ends", "state", "more"),
    [
        (attempt_that_raises(OutcomeUnknown("t: no route")), "wrong", 0),
        (attempt_that_raises(OutcomeUnknown("t: slow down"), aws_rejection("ThrottlingException")), "unknown", 1),
        (attempt_that_raises(SourceUnavailable("t: slow down"), aws_rejection("LimitExceededException")), "unknown", 1),
        (attempt_that_raises(SourceError("t: no such"), aws_rejection("ResourceNotFoundException")), "wrong", 0),
        (attempt_that_raises(Absent("there is no table")), "unknown", 0),
        (attempt_that_raises(NotTried("not tried")), "unknown", 1),
    ],
)
def test_an_outage_is_distinguished_from_a_rejection(ends: RightAttempt, state: str, more: int) -> None:
    findings = try_attempts(ends, FINE)
    assert ([findings[0].state], len(findings) - 1) == ([state], more)


def test_a_read_only_check_uses_no_right_to_write() -> None:
    findings = try_attempts(attempt_that_raises(StoreError("asked")), FINE, read_only=True)
    assert [finding.state for finding in findings] == ["unknown", "ok"]
    assert "--read-only" in findings[0].says
    assert has_no_wrong_finding(findings)


@pytest.mark.parametrize(("write", "state", "proved"), [(FINE, "ok", 1), (StoreError("t: no"), "unknown", 0)])
def test_conditions_are_tried_only_with_all_rights_to_write(
    write: RightAttempt | Exception, state: str, proved: int
) -> None:
    """If a store rejects writes because a permission is missing, it is not reported as ignoring conditions."""
    results, calls = examination._Results(), list[int]()  # noqa: SLF001  a step of an examination
    attempt = attempt_that_raises(write) if isinstance(write, Exception) else evolve(write, writes=True)
    trial = RightsTrial("table t", (FINE, attempt), None, lambda: calls.append(1), lambda: None)
    assert examination._try_rights(results, trial, examination.ExaminedFleet(Config()))  # noqa: SLF001  likewise
    assert ([(finding.state) for finding in results.findings if finding.what == "conditional writes"], len(calls)) == (
        [state],
        proved,
    )


OTHER = "name another table, or the source that this one belongs to"


@pytest.mark.parametrize(
    ("listing", "finding"),
    [
        (Listing(()), Finding("table", "ok", "it has no leases yet; workers create those of 2 shards")),
        (Listing(ROWS), Finding("table", "ok", "it has 2 leases of this stream, and 1 owners")),
        (
            Listing((), (Malformed("k-9", "checkpoint", "is missing"), Malformed("k-8", "owner", "is odd"))),
            Finding(
                "table",
                "wrong",
                "none of its 2 rows is a lease, for one 'k-8': owner: is odd: the table belongs to another application",
                OTHER,
            ),
        ),
        (
            Listing(ROWS, (Malformed("k-9", "checkpoint", "is missing"),)),
            Finding(
                "table",
                "wrong",
                "1 of 3 rows cannot be read as leases, for one 'k-9': checkpoint: is missing",
                "correct or delete these rows: no worker reads their shards",
            ),
        ),
        (
            Listing(tuple(Lease(f"t-{number}") for number in range(4))),
            Finding(
                "table",
                "wrong",
                "the stream has no shard for any of its 4 leases (t-0, t-1, t-2 …): it belongs to another stream",
                OTHER,
            ),
        ),
        (
            Listing((evolve(ROWS[0], hash_range=(0, 9)), Lease("s-old"))),
            Finding(
                "table",
                "wrong",
                "1 leases (s-0) have other hash ranges than the stream's shards: it belongs to another stream, or the "
                "stream was recreated",
                OTHER,
            ),
        ),
        (
            Listing((*ROWS, Lease("s-old"))),
            Finding(
                "table",
                "unknown",
                "the stream has no shard for 1 unfinished leases (s-old): past retention",
                "workers remove them; check that no worker was that far behind",
            ),
        ),
        (
            Listing((*ROWS, Lease("s-old", owner="w-2", checkpoint=SHARD_END))),
            Finding("table", "ok", "it has 3 leases of this stream, and 2 owners"),
        ),
    ],
)
def test_the_finding_on_a_table_is_exact(listing: Listing, finding: Finding) -> None:
    assert compare_with_stream(listing, SHARDS, lambda _lease: True) == (finding,)


@pytest.mark.parametrize(("seconds", "state"), [(300, "ok"), (301, "wrong"), (10_000, "wrong")])
def test_a_lease_length_in_milliseconds_is_reported(seconds: float, state: str) -> None:
    finding = gap_finding(Config(lease_seconds=seconds))
    assert (finding.state, "in milliseconds as in the KCL" in finding.todo) == (state, state == "wrong")


def test_the_finding_on_time_and_costs_is_exact() -> None:
    gap_text = "a shard is unread for at most 15.5 s after its worker crashed: 10.5 s until the lease expires, 5 s"
    late_text = "longer while the store does not respond"
    own_config, kcl_config = Config(lease_seconds=10, cycle_seconds=5), Config(Kcl(), lease_seconds=10, cycle_seconds=5)
    assert gap_finding(own_config) == Finding(
        "gap", "ok", f"{gap_text} until the next turn, usually sooner thanks to the lookout; {late_text}"
    )
    gap_text = gap_text.replace("15.5", "15.0").replace("10.5", "10")
    assert gap_finding(kcl_config) == Finding("gap", "ok", f"{gap_text} until the next turn; {late_text}")
    table, bucket = Fleet("dynamodb", 10, 2, 1.0), Fleet("s3", 10, 1, 1.0)
    idle_text = "10 open shards, 2 workers, layout usual: when idle 1.9 writes and 0.5 read units a second"
    busy_text = "with records all the time 10 writes and 0.5 read units a second"
    price_text = "(DynamoDB on demand, us-east-1, since November 2024)"
    sessions_text = "in layout sessions 3.5 writes and 0.9 read units a second"
    expected = (
        f"{idle_text}, US$ 3.26 a month; {busy_text}, US$ 16.59 a month; {sessions_text}, US$ 6.10 a month {price_text}"
    )
    assert cost_finding(table, Config(), LIST_PRICES["dynamodb"]) == Finding("cost", "ok", expected)
    assert cost_finding(table, Config(), None) == Finding("cost", "ok", f"{idle_text}; {busy_text}; {sessions_text}")
    assert (
        "layout sessions" not in cost_finding(evolve(table, shared=False), Config(), None).says
    )  # layout of the Azure SDKs
    sessions_finding = cost_finding(evolve(table, sessions=True), Config(), None).says
    assert "2 workers, layout sessions: when idle 1.4 writes" in sessions_finding
    assert sessions_finding.endswith("in layout usual 10 writes and 0.5 read units a second")
    assert "with records all the time 1,000 writes" in cost_finding(Fleet("s3", 500, 1, 1.0), Config(), None).says
    bucket_finding = cost_finding(bucket, Config(), None).says
    assert bucket_finding.startswith("10 open shards, 1 worker, layout usual: when idle ")
    assert " reads a second; with records all the time " in bucket_finding
    # Without a lookout, each worker lists the table once per cycle. Checkpoints after each batch are five per second.
    assert loads(evolve(table, shared=False), Config(cycle_seconds=20.0))[0].reads == pytest.approx(0.1 * 0.5, rel=0.2)
    assert loads(evolve(table, checkpoint_seconds=0.0), Config())[1].writes == pytest.approx(50)
    assert loads(Fleet("azblob", 6000, 1, 1.0, shared=False), Config(cycle_seconds=10.0))[0].reads == 0


@pytest.mark.parametrize(
    ("ahead", "state", "says"),
    [
        (0.0, "ok", "0.0 s ahead of"),
        (60.0, "ok", "60.0 s ahead of"),
        (-60.0, "ok", "60.0 s behind"),
        (60.1, "wrong", "60.1 s ahead of"),
        (-60.1, "wrong", "60.1 s behind"),
    ],
)
def test_a_clock_may_be_off_by_a_minute(ahead: float, state: FindingState, says: str) -> None:
    todo = (
        "set the clock: the service rejects requests from 5 min on, and lag is only as accurate as the clocks"
        if state == "wrong"
        else ""
    )
    assert clock_finding("x", ahead) == Finding(
        "clock of x", state, f"ours is {says} it (measured in whole seconds)", todo
    )
    assert clock_finding("x", None) == Finding("clock of x", "unknown", "the service's responses contain no time")


def test_leases_of_other_streams_are_fine_but_another_hub_is_a_fault() -> None:
    """A table may hold leases of many streams, but of only one hub, because all hubs number their partitions alike."""
    (finding,) = compare_with_stream(
        Listing((*ROWS, Lease("x:s-0", stream="x"))), SHARDS, lambda lease: not lease.stream
    )
    assert (finding.state, "; 1 leases belong to streams that are not read here" in finding.says) == ("ok", True)

    def refuse(_lease: Lease) -> bool:
        raise SourceError("lease '0': another hub")

    (finding,) = compare_with_stream(Listing(ROWS), SHARDS, refuse)
    assert (finding.state, finding.says) == ("wrong", "lease '0': another hub")


@pytest.mark.parametrize(("ours", "ahead"), [(1000.5, 0.0), (1100.5, 100.0), (900.0, -100.5)])
def test_the_clock_is_compared_with_the_date_of_a_response(ours: float, ahead: float) -> None:
    """A wrong clock is a problem because services reject requests with a signature from another time."""
    clock = ServiceClock(lambda: ours)
    clock.read_date_header(SimpleNamespace(headers={}))
    assert clock_finding("x", clock.seconds_ahead).state == "unknown"
    clock.read_date_header(SimpleNamespace(headers={"date": "Thu, 01 Jan 1970 00:16:40 GMT"}), parsed={})
    assert clock.seconds_ahead == ahead
    assert clock_finding("x", clock.seconds_ahead).state == ("ok" if abs(ahead) < 60 else "wrong")


def test_the_gap_is_a_lease_and_a_table_read() -> None:
    assert gap_seconds(Config(Kcl(), lease_seconds=10, cycle_seconds=5)) == 15
    assert gap_seconds(Config(lease_seconds=10, cycle_seconds=5)) == 15.5
    assert gap_seconds(with_event_hub_times(Config(), ())) == 1.05 * 120 + 30


@pytest.mark.parametrize(
    ("shards", "workers", "writes", "reads", "dollars"),
    [(10, 2, 10.8, 0.7, 18), (100, 10, 99.1, 4.4, 164), (1000, 50, 972.5, 28.3, 1607)],
)
def test_costs_agree_with_the_documented_measurements(
    shards: int, workers: int, writes: float, reads: float, dollars: float
) -> None:
    """The estimate agrees with the bill that docs/from-java-kcl.md shows."""
    idle_load, busy_load = loads(Fleet("dynamodb", shards, workers, 1.0), Config())
    assert busy_load.writes == pytest.approx(writes, rel=0.1)
    assert busy_load.reads == pytest.approx(reads, rel=0.3)
    assert busy_load.monthly_cost(LIST_PRICES["dynamodb"]) == pytest.approx(dollars, rel=0.1)
    assert idle_load.writes == pytest.approx(shards / 5.3)


@pytest.mark.parametrize(
    ("scheme", "shards", "workers", "dollars"),
    [("dynamodb", 10, 2, 5.5), ("dynamodb", 100, 10, 22.5), ("s3", 10, 2, 56.4), ("s3", 100, 10, 188.3)],
)
def test_costs_of_layout_sessions_agree_with_the_documented_ones(
    scheme: str, shards: int, workers: int, dollars: float
) -> None:
    """The estimate agrees with the costs in docs/sessions.md."""
    _, busy_load = loads(Fleet(scheme, shards, workers, 1.0, listings_per_read=3, sessions=True), Config())
    assert busy_load.monthly_cost(LIST_PRICES[scheme]) == pytest.approx(dollars, rel=0.2)


def test_objects_cost_two_writes_per_checkpoint_and_their_listings() -> None:
    fleet = Fleet("s3", 10, 2, 1.0, listings_per_read=3)
    idle_load, busy_load = loads(fleet, Config())
    assert [busy_load.writes, idle_load.writes] == pytest.approx([20 + 1, 10 / 5.3 + 1])
    assert "US$" in cost_finding(fleet, Config(), LIST_PRICES["s3"]).says
    assert "US$" not in cost_finding(fleet, Config(), None).says


def test_the_check_leaves_a_file_unchanged(tmp_path: Path) -> None:
    SqliteStore(str(tmp_path / "l.db")).close()
    trial = sqlite_trial(str(tmp_path / "l.db"), {})
    content_before = (tmp_path / "l.db").read_bytes()
    assert [(right_finding.what, right_finding.state) for right_finding in try_rights(trial, read_only=False)] == [
        ("read", "ok"),
        ("write", "ok"),
    ]
    trial.close()
    assert (tmp_path / "l.db").read_bytes() == content_before
    (finding,) = try_rights(sqlite_trial(str(tmp_path / "none.db"), {}), read_only=False)
    assert finding.state == "unknown"
    assert [path.name for path in tmp_path.iterdir()] == ["l.db"]


def test_a_store_that_ignores_conditions_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_unconditionally(_store: object, write: Write) -> Outcome:
        return Done(write.lease)

    monkeypatch.setattr(MemoryStore, "write", write_unconditionally)
    findings = list(try_rights(memory_trial("careless", {}), read_only=False))
    assert [finding.state for finding in findings] == ["ok", "wrong"]
    assert "under a condition that did not hold" in findings[1].says


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing://x", "--store", "memory://m"], "source URL: unknown scheme"),
        (["kinesis://x", "--store", "file://b.jsonl"], "store URL: file:// is a backup"),
        (["kinesis://x", "--store", "memory://m?a=b"], "store URL: unknown option 'a'"),
        (["kinesis://x", "--store", "memory://m", "--rules", "none"], "rules"),
        (
            ["kinesis://x", "--store", "azblob://a/c", "--write-price", "5"],
            "--read-price: no list price",
        ),
    ],
)
def test_a_store_that_cannot_be_examined_exits_2(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr


def test_every_store_and_source_can_be_examined() -> None:
    # No fleet works on a backup file.
    assert set(examination._STORES) == set(stores._SCHEMES) - {"file"}  # noqa: SLF001  two lists of the same
    assert set(examination._SOURCES) == set(sources._SCHEMES)  # noqa: SLF001  likewise


def test_an_unreachable_source_does_not_hide_the_store(tmp_path: Path) -> None:
    SqliteStore(str(tmp_path / "l.db")).close()
    arguments = [
        "kinesis://orders?endpoint=http://127.0.0.1:1&region=eu-west-1",
        "--store",
        f"sqlite://{tmp_path}/l.db",
    ]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    report = json.loads(result.stdout)
    assert (result.exit_code, report["well"], report["expected"]) == (1, False, {"gap_seconds": 30.55})
    states = {finding["what"]: finding["state"] for finding in report["findings"]}
    assert states == {
        "kinesis:DescribeStreamSummary": "wrong",
        "clock of stream orders": "unknown",
        "read": "ok",
        "write": "ok",
        "conditional writes": "ok",
        "table": "unknown",
        "gap": "ok",
    }
    output_lines = CliRunner().invoke(app, arguments).stdout.splitlines()
    assert output_lines[0].startswith("WRONG    kinesis:DescribeStreamSummary")
    assert output_lines[-1] == "7 findings: 1 wrong, 2 unknown"


def test_a_store_that_bills_no_requests_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SqliteStore(str(tmp_path / "l.db")).close()
    monkeypatch.setattr(examination, "open_source", lambda _url: ListSource([Shard("s-0")]))
    arguments = [
        "kinesis://orders?endpoint=http://127.0.0.1:1&region=eu-west-1",
        "--store",
        f"sqlite://{tmp_path}/l.db",
    ]
    report = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert report["expected"] == {"gap_seconds": 30.55}
    assert [finding["what"] for finding in report["findings"]][-3:] == ["table", "gap", "size"]


@pytest.mark.parametrize(
    ("leases", "workers", "state", "todo"),
    [
        (0, 1, "ok", ""),
        (1_000, 100, "ok", ""),
        (7_940, 1, "ok", ""),
        (7_960, 1, "unknown", "more workers"),
        (15_901, 1, "wrong", "more workers"),
        (10_000, 110, "unknown", "fewer workers"),
        (10_000, 201, "wrong", "fewer workers"),
    ],
)
def test_an_oversized_fleet_gets_a_warning(leases: int, workers: int, state: str, todo: str) -> None:
    """In a fleet above the limit, leases would be renewed late and taken from live workers."""
    finding = size_finding(leases, workers, Config())
    assert (finding.what, finding.state, finding.todo.split(", or")[0]) == ("size", state, todo)


def test_the_finding_on_size_contains_its_figures() -> None:
    assert size_finding(2_000, 4, Config()).says == (
        "500 leases a worker are renewed in time if the store responds within 636 ms; "
        "2000 leases x 4 workers are 8,000, of at most some 2,000,000"
    )


class CarelessObjects(ObjectMemory):
    """A bucket that ignores the condition of a write."""

    def put_if_match(self, name: str, fields: ObjectFields, _etag: str) -> str | None:
        super().put_if_match(name, fields, "")
        return self._put("over", name, fields)


@pytest.mark.parametrize(
    ("trial", "module", "name"), [(s3_trial, "s3", "S3Objects"), (gcs_trial, "gcs", "GcsObjects")], ids=["s3", "gcs"]
)
def test_a_trial_of_a_bucket_waits_only_seconds_for_a_response(
    trial: Callable[[str, Mapping[str, str]], object], module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's own timeouts are longer."""
    opened_with: list[Timeouts] = []

    def open_objects(*_arguments: object, timeouts: Timeouts | None = None, **_options: object) -> ObjectMemory:
        opened_with.extend([timeouts] if timeouts else [])
        return ObjectMemory()

    monkeypatch.setattr(f"leasehold.stores.objects.{module}.{name}", open_objects)
    trial("bucket/fleet", {})
    assert [(item.connect_seconds + item.read_seconds) * item.attempts <= REQUEST_SECONDS for item in opened_with] == [
        True
    ]


def test_no_object_stays_in_a_bucket_that_ignores_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = CarelessObjects()
    monkeypatch.setattr("leasehold.stores.objects.s3.S3Objects", lambda *_arguments, **_options: objects)
    tuple(try_rights(s3_trial("bucket/fleet", {}), read_only=False))
    assert [line.split()[0] for line in objects.log] == ["list", "get", "over", "delete", "delete"]
    assert objects.stored == {}
