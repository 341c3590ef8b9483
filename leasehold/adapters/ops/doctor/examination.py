"""Examines a source and a store, and predicts two values for a fleet that uses them.

The source is checked first, then the store and its table. The predicted values are the longest time for which a shard
is unread after a crash, and the cost of the store. Both predictions assume that no worker joins or leaves the fleet.
`benchmarks/checkpoint_writes.py` measures the same values in virtual time.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from attrs import Factory, define, evolve, frozen

from leasehold.adapters.consumer.runner import RENEWERS_MAX
from leasehold.adapters.inputs import SETTING_LIMITS
from leasehold.adapters.ops.doctor.attempts import (
    Finding,
    RightsTrial,
    clock_finding,
    compare_with_stream,
    has_no_wrong_finding,
    try_rights,
)
from leasehold.adapters.sources.protocol import IdentifiedSource, SelectiveSource, Source
from leasehold.adapters.sources.urls import open_source, source_address
from leasehold.adapters.worker.progress import ANNOTATE_SECONDS
from leasehold.balancer.config import Config
from leasehold.balancer.contradictions import contradictions
from leasehold.balancer.lookout import LOOKOUT_LISTING_SECONDS, scale_to_lease_seconds
from leasehold.balancer.model import Shard
from leasehold.errors import OutcomeUnknown, SourceError, StoreError
from leasehold.stores.protocol import Capabilities, Listing, Store
from leasehold.stores.urls import Scheme, open_store, split_store_url

BILLED_SCHEMES = frozenset({"dynamodb", "s3", "azblob", "gcs"})
"""The schemes of stores that bill requests."""

MONTH = 730 * 3600
MILLION = 1_000_000
ROW_BYTES, UNIT_BYTES = 360, 4096
"""The sizes of a lease in DynamoDB and of a read unit, in bytes.

An eventually consistent read, such as a listing, costs half a unit.
"""
WRITE_BYTES = 1024
"""The size of a write unit."""
SESSION_BYTES, ANNOTATIONS_BYTES = (250, 38), (330, 48)
"""The compressed sizes of a session's row and of its annotations: first without leases, then the increase per lease.

`row_bytes` of benchmarks/session_requests.py prints these sizes for names, sequence numbers and annotations of Kinesis.
"""
ROW_READ_SECONDS = 1.5
"""The measured time between two reads of the lookout's row by another worker, if `lease_seconds` is 10."""


@frozen
class Price:
    """The prices of a million writes and a million reads, in US$. Listings of objects are priced as writes."""

    write: float
    read: float
    source: str


LIST_PRICES: Mapping[str, Price] = {
    "dynamodb": Price(0.625, 0.125, "DynamoDB on demand, us-east-1, since November 2024"),
    "s3": Price(5.0, 0.4, "S3 Standard, us-east-1, 2025"),
    "gcs": Price(5.0, 0.4, "Cloud Storage Standard, one region, 2025"),
}
"""List prices by scheme. Azure's prices depend on redundancy and tier, so a user of Azure must pass prices."""


@frozen
class Load:
    """How many requests per second a fleet sends to its store. For object stores, listings count as writes."""

    writes: float
    reads: float

    def monthly_cost(self, price: Price) -> float:
        """Return the cost per month (730 hours) in US$."""
        return MONTH * (self.writes * price.write + self.reads * price.read) / MILLION


@frozen
class Fleet:
    """A fleet on a store.

    Attributes:
        scheme: The scheme of the store's URL.
        leases: The number of unfinished leases.
        workers: The number of workers.
        checkpoint_seconds: The time between two checkpoints of a shard; 0 for one after every batch.
        shared: Whether a lookout can read the table for all workers (`capabilities.free_annotations`).
        listings_per_read: The number of list requests for one read of the table. It matters only for object stores.
        sessions: Whether the table has the layout `sessions`.
    """

    scheme: str
    leases: int
    workers: int
    checkpoint_seconds: float
    shared: bool = True
    listings_per_read: int = 1
    sessions: bool = False

    @property
    def layout(self) -> str:
        """The name of the table's layout in messages and JSON."""
        return "sessions" if self.sessions else "usual"


def gap_seconds(config: Config) -> float:
    """Return the longest time for which a shard is unread after its worker has crashed.

    The longest time is the time until the lease expires, plus the time until another worker's next turn.
    """
    return config.rules.expires_above(config.lease_seconds) + config.cycle_seconds


def gap_finding(config: Config) -> Finding:
    """Return the finding about the longest time that a shard is unread after a crash."""
    gap_text = f"a shard is unread for at most {gap_seconds(config):.1f} s after its worker crashed"
    gap_parts = (
        f"{config.rules.expires_above(config.lease_seconds):g} s until the lease expires, {config.cycle_seconds:g} s"
    )
    remark = ", usually sooner thanks to the lookout" if config.rules.keeps_lookout else ""
    usual_seconds = SETTING_LIMITS["lease_seconds"].usual
    is_long = config.lease_seconds > usual_seconds
    return Finding(
        "gap",
        "wrong" if is_long else "ok",
        f"{gap_text}: {gap_parts} until the next turn{remark}; longer while the store does not respond",
        f"lease_seconds is in seconds, not in milliseconds as in the KCL; set it to {usual_seconds:g} or less"
        if is_long
        else "",
    )


def loads(fleet: Fleet, config: Config) -> tuple[Load, Load]:
    """Return the load of an idle fleet, and the load of a fleet whose shards receive records all the time."""
    if fleet.sessions:
        return _loads_of_sessions(fleet, config)
    is_object_store = fleet.scheme in {"s3", "azblob", "gcs"}
    has_lookout = config.rules.keeps_lookout and fleet.shared
    looks_per_second = (
        1 / scale_to_lease_seconds(LOOKOUT_LISTING_SECONDS, config)
        if has_lookout
        else fleet.workers / config.cycle_seconds
    )
    row_reads_per_second = (
        (fleet.workers - 1) / scale_to_lease_seconds(ROW_READ_SECONDS, config) if has_lookout else 0.0
    )

    def load(writes: float) -> Load:
        if not is_object_store:
            scan_units = max(0.5, fleet.leases * ROW_BYTES / UNIT_BYTES / 2)
            return Load(writes, looks_per_second * scan_units + row_reads_per_second / 2)
        page_size = 5000 if fleet.scheme == "azblob" else 1000
        # In S3, a listing only shows which objects have changed, so each changed object must be read afterwards.
        fetched_objects = min(writes, 2 * fleet.leases * looks_per_second) if fleet.scheme == "s3" else 0.0
        return Load(
            writes + looks_per_second * fleet.listings_per_read * math.ceil(fleet.leases / page_size),
            row_reads_per_second + fetched_objects,
        )

    idle_renewals = fleet.leases / config.renew_seconds
    checkpoint_seconds = fleet.checkpoint_seconds or 0.2
    return load(idle_renewals), load(
        max(idle_renewals, fleet.leases * (2 if is_object_store else 1) / checkpoint_seconds)
    )


def _loads_of_sessions(fleet: Fleet, config: Config) -> tuple[Load, Load]:
    """Return the loads in the layout `sessions`, which renews all leases of a worker with one write.

    Each worker also writes a row of annotations.
    """
    average_leases = math.ceil(fleet.leases / fleet.workers)
    session_size, size_of_annotations = (
        base_size + size_per_lease * average_leases for base_size, size_per_lease in (SESSION_BYTES, ANNOTATIONS_BYTES)
    )
    looks_per_second = 1 / scale_to_lease_seconds(LOOKOUT_LISTING_SECONDS, config)
    # The lookout writes a renewal each time it reads the table. A checkpoint cannot replace such a renewal, because it
    # doesn't contain the lookout's bulletin.
    renewals_per_second = fleet.workers / config.renew_seconds + looks_per_second
    annotation_writes = fleet.workers / ANNOTATE_SECONDS + 2 * looks_per_second
    row_reads = (fleet.workers - 1) / scale_to_lease_seconds(ROW_READ_SECONDS, config)
    page_size = 5000 if fleet.scheme == "azblob" else 1000
    listings_per_look = 2 * math.ceil(fleet.workers / page_size) + math.ceil(fleet.leases / page_size)

    def load(session_writes: float, annotation_writes_per_second: float) -> Load:
        if fleet.scheme == "dynamodb":
            write_units = session_writes * math.ceil(
                session_size / WRITE_BYTES
            ) + annotation_writes_per_second * math.ceil(size_of_annotations / WRITE_BYTES)
            table_bytes = fleet.leases * ROW_BYTES + fleet.workers * (session_size + size_of_annotations)
            return Load(write_units, looks_per_second * max(0.5, table_bytes / UNIT_BYTES / 2) + row_reads)
        fetched_objects = min(session_writes, fleet.workers * looks_per_second) + min(
            annotation_writes_per_second, fleet.workers * looks_per_second
        )
        return Load(
            session_writes + annotation_writes_per_second + looks_per_second * listings_per_look,
            row_reads + (fetched_objects if fleet.scheme == "s3" else 0.0),
        )

    return load(renewals_per_second, renewals_per_second), load(
        annotation_writes + fleet.workers / (fleet.checkpoint_seconds or 0.2), annotation_writes
    )


def layouts(fleet: Fleet) -> tuple[Fleet, ...]:
    """Return the fleet in its current layout and, if its store offers another layout, also in that layout."""
    return (fleet, evolve(fleet, sessions=not fleet.sessions)) if fleet.shared else (fleet,)


def cost_finding(fleet: Fleet, config: Config, price: Price | None) -> Finding:
    """Return the finding about the number and the cost of requests to the store, in each layout."""
    unit, rounding_limit = (" units" if fleet.scheme == "dynamodb" else ""), 10

    def describe(load: Load) -> str:
        writes, reads = (
            f"{rate:.2g}" if rate < rounding_limit else f"{rate:,.0f}" for rate in (load.writes, load.reads)
        )
        rates = f"{writes} writes and {reads} read{unit or 's'} a second"
        return rates + (f", US$ {load.monthly_cost(price):,.2f} a month" if price else "")

    fleet_description = f"{fleet.leases} open shards, {fleet.workers} {'worker' if fleet.workers == 1 else 'workers'}"
    idle_load, busy_load = loads(fleet, config)
    sentences = [
        f"{fleet_description}, layout {fleet.layout}: when idle {describe(idle_load)}",
        f"with records all the time {describe(busy_load)}",
    ]
    sentences += [
        f"in layout {other_fleet.layout} {describe(loads(other_fleet, config)[1])}"
        for other_fleet in layouts(fleet)[1:]
    ]
    return Finding("cost", "ok", "; ".join(sentences) + (f" ({price.source})" if price else ""))


RESPONSE_SECONDS = 0.02
"""The time within which a store in the same region nearly always responds.

A store on another continent needs at least 0.1 s.
"""
LEASES_TIMES_WORKERS_MAX = 2_000_000
"""The maximum product of leases and workers.

With a larger product, DynamoDB is too slow for every worker to read the table within the duration of a lease.
"""


def size_finding(lease_count: int, worker_count: int, config: Config) -> Finding:
    """Return the finding about whether the store is fast enough for a fleet of this size.

    Above half of a limit, the state is "unknown". Above the limit, it is "wrong". The limits are from docs/limits.md.
    """
    leases_per_worker, leases_times_workers = math.ceil(lease_count / worker_count), lease_count * worker_count
    response_seconds = RENEWERS_MAX * config.renew_seconds / max(1, leases_per_worker)
    limit_ratio = min(response_seconds / RESPONSE_SECONDS, LEASES_TIMES_WORKERS_MAX / max(1, leases_times_workers))
    milliseconds = f"{response_seconds * 1000:,.0f} ms"
    size_text = f"{leases_per_worker} leases a worker are renewed in time if the store responds within {milliseconds}"
    size_text += (
        f"; {lease_count} leases x {worker_count} workers are {leases_times_workers:,}, of at most some "
        f"{LEASES_TIMES_WORKERS_MAX:,}"
    )
    if limit_ratio > 2:  # noqa: PLR2004  half of a limit
        return Finding("size", "ok", size_text)
    too_few_workers = response_seconds / RESPONSE_SECONDS < LEASES_TIMES_WORKERS_MAX / max(1, leases_times_workers)
    advice = (
        "more workers, or a longer --lease-seconds"
        if too_few_workers
        else "fewer workers, or a table for each part of the shards"
    )
    return Finding("size", "unknown" if limit_ratio >= 1 else "wrong", size_text, advice)


_HERE = "leasehold.adapters.ops.doctor."
_SOURCES = {
    "kinesis": Scheme(f"{_HERE}kinesis", extra="aws"),
    "dynamodb-streams": Scheme(f"{_HERE}dynamodb_streams", extra="aws"),
    "eventhubs": Scheme(f"{_HERE}event_hubs", extra="azure"),
}
_STORES = {
    "memory": (Scheme(f"{_HERE}embedded"), "memory_trial"),
    "sqlite": (Scheme(f"{_HERE}embedded"), "sqlite_trial"),
    "dynamodb": (Scheme(f"{_HERE}dynamodb", extra="aws"), "trial"),
    "azblob": (Scheme(f"{_HERE}objects", extra="azure"), "blob_trial"),
    "s3": (Scheme(f"{_HERE}objects", extra="aws"), "s3_trial"),
    "gcs": (Scheme(f"{_HERE}objects", extra="gcs"), "gcs_trial"),
    "postgres": (Scheme(f"{_HERE}postgres", extra="postgres"), "trial"),
}


@frozen
class ExaminedFleet:
    """The fleet to examine, and the requests that the examination may send.

    Attributes:
        config: The configuration of the fleet's workers.
        workers: The number of workers; None for the number of workers that own leases now, at least one.
        checkpoint_seconds: The time between two checkpoints of a shard.
        write_price: US$ for a million writes; None for the list price, if known.
        read_price: US$ for a million reads; None for the list price, if known.
        read_only: Whether to send no writes at all, not even writes that the store must reject.
    """

    config: Config
    workers: int | None = None
    checkpoint_seconds: float = 1.0
    write_price: float | None = None
    read_price: float | None = None
    read_only: bool = False


@define
class _Results:
    """The findings so far, and the data that later steps need."""

    findings: list[Finding] = Factory(list)
    shards: tuple[Shard, ...] | None = None
    listing: Listing | None = None
    capabilities: Capabilities = Factory(Capabilities)


@frozen
class Examination:
    """The findings of an examination, and the expectations for the fleet as JSON values."""

    findings: tuple[Finding, ...]
    expected: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the examination as JSON values."""
        findings = [finding.as_json() for finding in self.findings]
        return {"well": has_no_wrong_finding(self.findings), "findings": findings, "expected": dict(self.expected)}


def examine(source: str, store: str, fleet: ExaminedFleet) -> Examination:
    """Examine a source and a store. Failures become findings. Raises ValueError for a URL that is not valid."""
    source_scheme, source_place, source_options = source_address(source)
    store_scheme, store_place, store_options = split_store_url(store)
    if store_scheme == "file":
        raise ValueError("store URL: file:// is a backup, on which no fleet works; name a store")
    for kind, url_scheme, known_schemes in (("source", source_scheme, _SOURCES), ("store", store_scheme, _STORES)):
        if url_scheme not in known_schemes:
            raise ValueError(f"{kind} URL: another package adds {url_scheme}://, and doctor has no checks for it")
    price, results = _find_prices(store_scheme, fleet), _Results()
    with _failures_as_findings(results, "source"):
        for source_trial in _SOURCES[source_scheme].load("source", SourceError).trials(source_place, source_options):
            _try_rights(results, source_trial, fleet)
    with _failures_as_findings(results, "store"):
        module, name = _STORES[store_scheme]
        trial: RightsTrial = getattr(module.load("store", StoreError), name)(store_place, store_options)
        if _try_rights(results, trial, fleet):
            # Read the rows as a worker does. If the table has another layout, this raises an error.
            with _failures_as_findings(results, "table"):
                table: Store = open_store(store, create=False, write=False)
                with closing(table):
                    results.capabilities, results.listing = table.capabilities, table.list()
    if results.listing is not None:
        _compare_table(results, source, results.listing)
    listings_per_read = 1 if store_scheme == "dynamodb" else 2 if "eventhub" in store_options else 3
    # The longest gap can always be computed. The cost can only be computed if the number of shards is known and the
    # store bills its requests.
    findings, expected_values = (
        [*results.findings, gap_finding(fleet.config)],
        {"gap_seconds": round(gap_seconds(fleet.config), 3)},
    )
    if results.shards is None:
        return Examination(tuple(findings), expected_values)
    leases = () if results.listing is None else results.listing.leases
    owner_count = len({lease.owner for lease in leases if lease.owner and not lease.ended})
    open_shard_count = sum(shard.open for shard in results.shards)
    workers, checkpoint_seconds = fleet.workers or max(1, owner_count), fleet.checkpoint_seconds
    findings.append(size_finding(open_shard_count, workers, fleet.config))
    if store_scheme not in BILLED_SCHEMES:
        return Examination(tuple(findings), expected_values)
    is_sessions = results.capabilities.groups_writes or store_options.get("layout") == "sessions"
    current_fleet = Fleet(
        store_scheme,
        open_shard_count,
        workers,
        checkpoint_seconds,
        results.capabilities.free_annotations,
        listings_per_read,
        is_sessions,
    )
    findings.append(cost_finding(current_fleet, fleet.config, price))
    costs_by_layout = {
        candidate.layout: {
            name: {
                "writes": round(load.writes, 3),
                "reads": round(load.reads, 3),
                "us_dollars_a_month": None if price is None else round(load.monthly_cost(price), 2),
            }
            for name, load in zip(("at_rest", "under_records"), loads(candidate, fleet.config), strict=True)
        }
        for candidate in layouts(current_fleet)
    }
    costs_shown = {
        "shards": open_shard_count,
        "workers": workers,
        "layout": current_fleet.layout,
        **costs_by_layout[current_fleet.layout],
        "layouts": costs_by_layout,
    }
    return Examination(tuple(findings), {**expected_values, **costs_shown})


@contextmanager
def _failures_as_findings(results: _Results, part: str) -> Iterator[None]:
    """Turn an error that stops this part of the examination into a finding."""
    try:
        yield
    except OutcomeUnknown as error:
        if part != "table":
            results.findings.append(Finding(part, "wrong", str(error)))
        else:
            results.findings.append(Finding(part, "unknown", f"no usable response: {error}", "run this again later"))
    except (StoreError, SourceError) as error:
        results.findings.append(Finding(part, "wrong", str(error)))


def _try_rights(results: _Results, trial: RightsTrial, fleet: ExaminedFleet) -> bool:
    """Try all rights of a trial, and return whether its service was reached."""
    with closing(trial):
        findings = tuple(try_rights(trial, read_only=fleet.read_only))
        results.findings += findings
        if trial.check_conditions is not None:
            results.findings.append(_try_conditional_writes(trial.check_conditions, trial, findings))
    if trial.clock is not None:
        results.findings.append(clock_finding(trial.name, trial.clock.seconds_ahead))
    return findings[0].state == "ok"


def _try_conditional_writes(
    check_conditions: Callable[[], object], trial: RightsTrial, findings: Iterable[Finding]
) -> Finding:
    states = {finding.what: finding.state for finding in findings}
    if any(states.get(attempt.right) != "ok" for attempt in trial.attempts if attempt.writes):
        return Finding("conditional writes", "unknown", f"{trial.name}: not tried without all rights to write")
    try:
        check_conditions()
    except OutcomeUnknown as error:
        return Finding("conditional writes", "unknown", f"no usable response: {error}", "run this again later")
    except StoreError as error:
        return Finding("conditional writes", "wrong", str(error))
    return Finding("conditional writes", "ok", f"{trial.name}: rejected if their condition does not hold")


def _compare_table(results: _Results, url: str, listing: Listing) -> None:
    try:
        source: Source = open_source(url)
        with closing(source):
            results.shards = source.shards()
            reads_lease = source.reads if isinstance(source, SelectiveSource) else lambda _lease: True
            results.findings += compare_with_stream(listing, results.shards, reads_lease)
            incarnation = source.incarnation() if isinstance(source, IdentifiedSource) else ""
            # The table was read before the shards were listed, so a shard that ended in between does not contradict its
            # lease.
            conflicts = contradictions(results.shards, listing.leases, incarnation)
            results.findings += [
                Finding("contradiction", "wrong", conflict.what)
                for conflict in conflicts
                if conflict.kind != "another shard"  # reported above
            ]
    except SourceError:  # the error is reported with the rights on the source
        problem = (
            f"it has {len(listing.leases)} leases; without its shards, we cannot tell whether they belong to the stream"
        )
        results.findings.append(Finding("table", "unknown", problem))


def _find_prices(scheme: str, fleet: ExaminedFleet) -> Price | None:
    """Return the prices of this store. Prices that the user passed replace list prices."""
    list_price = LIST_PRICES.get(scheme)
    if fleet.write_price is None and fleet.read_price is None:
        return list_price
    write_price = fleet.write_price if fleet.write_price is not None else list_price.write if list_price else None
    read_price = fleet.read_price if fleet.read_price is not None else list_price.read if list_price else None
    if write_price is None or read_price is None:
        raise ValueError("--write-price and --read-price: no list price is known for this store; give both")
    return Price(write_price, read_price, "prices as given")
