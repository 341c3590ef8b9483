"""Fuzz targets for the contents of lease tables (rows, blobs, objects and annotations), and for table URLs."""

import json
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from attrs import evolve
from fuzzing import FuzzTarget, encode_as_json
from odd_values import assert_said, token_of
from standins.wire_service import Answer, Spoken

from leasehold.adapters.cli.common.columns import format_position
from leasehold.adapters.consumer.status import lag_of
from leasehold.adapters.json_form import format_lease_json, plan_from_json
from leasehold.adapters.worker.progress import progress_of
from leasehold.balancer.bulletin import bulletin_of
from leasehold.balancer.model import Bulletin, Lease
from leasehold.balancer.watch import Reports, Watch
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores import postgres
from leasehold.stores.aws_calls import tables as aws_calls
from leasehold.stores.dynamodb import cells as dynamodb_cells
from leasehold.stores.dynamodb.rows import parse_reports, to_item, to_lease
from leasehold.stores.dynamodb.store import DynamoStore
from leasehold.stores.embedded import file
from leasehold.stores.embedded.sqlite import COLUMNS, to_row
from leasehold.stores.embedded.sqlite import to_lease as row_to_lease
from leasehold.stores.fields import parse_row
from leasehold.stores.objects import blob, s3
from leasehold.stores.objects.event_hubs_layout import EventHubLayout
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.store import Layout
from leasehold.stores.protocol import Malformed
from leasehold.stores.requests import Parts, StoredObject
from leasehold.stores.sessions.rows import (
    LeaseRow,
    encode_lease_row,
    encode_remarks,
    encode_session,
    join_lease,
    parse_lease_row,
    parse_remarks,
    parse_session,
)
from leasehold.stores.urls import check_endpoint, parse_date_header, split_store_url

if TYPE_CHECKING:
    from boto3.session import Session

HUB = EventHubLayout("ns.servicebus.windows.net", "Orders", "$Default")
FLEET = ObjectLayout("fleet/one")


def _read(lease: Lease | Malformed | None) -> Lease | None:
    """Return the lease, after checking that commands can show it and that `plan` accepts its JSON form."""
    assert_said(lease)
    if not isinstance(lease, Lease):
        return None
    format_position(lease.checkpoint)
    plan_from_json(json.dumps({"leases": [format_lease_json(lease)], "me": {"worker": "me"}}).encode())
    return lease


def _item(item: object) -> None:
    if isinstance(item, dict) and (lease := _read(to_lease(item))):
        expected_lease = evolve(lease, next_owner=None, leaving=False, yields=lease.owner is not None)
        assert token_of(cast("Lease", to_lease(to_item(lease)))) == token_of(expected_lease)


def _reports(items: object) -> None:
    if isinstance(items, list) and all(isinstance(item, dict) for item in items):
        reports = parse_reports(items)
        assert isinstance(reports, Reports)
        assert all(isinstance(value, str) for stamp in reports.stamps for value in stamp)


@cache
def _table() -> tuple[DynamoStore, Spoken]:
    """Return a store whose service sends canned responses.

    The store is cached, because creating a client takes longer than a hundred scans.
    """
    import boto3  # noqa: PLC0415  only this target needs it

    canned_responses = Spoken([])
    keys = [{"AttributeName": "leaseKey", "KeyType": "HASH"}]
    kinds = [{"AttributeName": "leaseKey", "AttributeType": "S"}]
    table_description = {
        "Table": {"TableName": "leases", "TableStatus": "ACTIVE", "KeySchema": keys, "AttributeDefinitions": kinds}
    }
    canned_responses.answers[:] = [Answer(json.dumps(table_description).encode())] * 2

    class Attached(boto3.Session):
        def client(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  boto3's own signature
            client = super().client(*args, **options)
            client.meta.events.register("before-send.dynamodb", canned_responses)
            return client

    return DynamoStore("leases", session=cast("Session", Attached(region_name="eu-west-1"))), canned_responses


def _scan(body: bytes) -> None:
    store, canned_responses = _table()
    canned_responses.answers[:] = [Answer(body)] * 3
    listing = store.list()
    assert all(isinstance(lease, Lease) for lease in listing.leases)


def _row(cells: object) -> None:
    if not isinstance(cells, dict):
        return
    cells_by_name = {
        name: value if isinstance(value, str | bytes | float | int | None) else None for name, value in cells.items()
    }
    row: Any = {**to_row(Lease("s-0")), **{name: cells_by_name[name] for name in COLUMNS if name in cells_by_name}}
    if lease := _read(row_to_lease(row)):
        assert token_of(cast("Lease", row_to_lease(cast("Any", to_row(lease))))) == token_of(lease)


def _line(text: str) -> None:
    if lease := _read(file._parse_line(1, text)):
        assert token_of(cast("Lease", file._parse_line(1, file.format_line(lease)))) == token_of(lease)


def _objects(layout: Layout, document: object) -> None:
    parts: dict[str, dict[str, object]] = document if isinstance(document, dict) else {}
    stored_objects = {
        part: StoredObject(part, "e", {name: text for name, text in parts[part].items() if isinstance(text, str)})
        for part in ("ownership", "checkpoint", "notes")
        if isinstance(parts.get(part), dict)
    }
    _read(parse_row("0", lambda: layout.lease("0", Parts(**stored_objects))))


def _object_name(name: str) -> None:
    for layout in (FLEET, HUB):
        for part in layout.parts:
            stored_name = layout.prefix(part) + name
            key = layout.key(stored_name, part)
            assert key is None or layout.name(key, part) == stored_name


def _content(body: bytes) -> None:
    assert {type(text) for pair in s3._parse_body(body).items() for text in pair} <= {str}


def _session_rows(document: object) -> None:
    parts: dict[str, dict[str, object]] = document if isinstance(document, dict) else {}
    lease, session, remarks = (
        StoredObject(part, "e", {name: text for name, text in parts[part].items() if isinstance(text, str)})
        if isinstance(parts.get(part), dict)
        else StoredObject(part, "e", {})
        for part in ("lease", "session", "told")
    )
    row, owner = parse_lease_row("s-0", lease), parse_session(session)
    assert_said(owner if isinstance(owner, Malformed) else None)
    assert_said(row if isinstance(row, Malformed) else None)
    if isinstance(row, Malformed) or isinstance(owner, Malformed):
        return
    lease_read = join_lease(row, owner, parse_remarks(remarks))
    if _read(lease_read.lease) is not None:
        lease_read_again = join_lease(
            cast("LeaseRow", parse_lease_row("s-0", evolve(lease, fields=encode_lease_row(row)))),
            cast("Any", parse_session(evolve(session, fields=encode_session(owner)))),
            parse_remarks(evolve(remarks, fields=encode_remarks(parse_remarks(remarks)))),
        )
        assert token_of(lease_read_again.lease) == token_of(lease_read.lease)


def _session_cell(document: object) -> None:
    """Parse a table row whose attributes have any types that DynamoDB allows."""
    types_by_tag = {"S": str, "B": bytes, "M": dict}
    item: Any = {
        name: {kind: value for kind, value in attribute.items() if isinstance(value, types_by_tag.get(kind, ()))}
        for name, attribute in (document.items() if isinstance(document, dict) else ())
        if isinstance(attribute, dict)
    }
    item["entityType"] = {"S": dynamodb_cells.SESSION_ROW_TYPE}
    stored_row = dynamodb_cells._parse_row("leases", item)
    assert {type(text) for pair in stored_row.fields.items() for text in pair} <= {str}


def _direct(body: bytes) -> None:
    response = aws_calls._parse_response(body)
    assert response is None or isinstance(response, dict)


def _notes(annotations: object) -> None:
    pairs = annotations.items() if isinstance(annotations, dict) else ()
    text_annotations = tuple(sorted((name, text) for name, text in pairs if isinstance(text, str)))
    lease = Lease("s-0", owner="ann", annotations=text_annotations)
    assert isinstance(bulletin_of(lease), Bulletin)
    Watch().look((lease,), 1.0, 2.0)
    progress_of(lease)
    json.dumps(lag_of(lease, 1.8e9, 10.0).as_json())


def _url(url: str) -> None:
    scheme, location, options = split_store_url(url)
    check_endpoint(options.get("endpoint"))
    if scheme == "azblob":
        blob._parse_layout(options)
    if scheme == "postgres":
        postgres.parse_location(location, options)


STORES = (
    FuzzTarget("dynamodb-rows", ("stores/dynamodb/rows.py", "stores/fields.py"), _item),
    FuzzTarget("dynamodb-reports", ("stores/dynamodb/rows.py",), _reports),
    FuzzTarget(
        "dynamodb-listings",
        ("stores/dynamodb/store.py", "stores/dynamodb/store.py"),
        _scan,
        (OutcomeUnknown, StoreError),
        "leases: |lease ",
        pack=encode_as_json,
    ),
    FuzzTarget("sqlite-rows", ("stores/embedded/sqlite.py", "stores/fields.py"), _row),
    FuzzTarget("backup-lines", ("stores/embedded/file.py", "stores/embedded/sqlite.py"), _line),
    FuzzTarget("generic-objects", ("stores/objects/generic_layout.py",), lambda found: _objects(FLEET, found)),
    FuzzTarget("event-hub-blobs", ("stores/objects/event_hubs_layout.py",), lambda found: _objects(HUB, found)),
    FuzzTarget(
        "object-names", ("stores/objects/generic_layout.py", "stores/objects/event_hubs_layout.py"), _object_name
    ),
    FuzzTarget("session-rows", ("stores/sessions/rows.py", "stores/requests.py"), _session_rows),
    FuzzTarget("session-cells", ("stores/dynamodb/cells.py",), _session_cell),
    FuzzTarget("direct-answers", ("stores/aws_calls/tables.py",), _direct, pack=encode_as_json),
    FuzzTarget("s3-objects", ("stores/objects/s3.py",), _content, pack=encode_as_json),
    FuzzTarget("date-headers", ("stores/urls.py",), parse_date_header),
    FuzzTarget(
        "lease-notes", ("balancer/lookout.py", "adapters/worker/holding.py", "adapters/worker/progress.py"), _notes
    ),
    FuzzTarget(
        "store-urls",
        ("stores/urls.py", "stores/urls.py", "stores/urls.py", "stores/objects/blob.py", "stores/postgres.py"),
        _url,
        (ValueError,),
        "store URL: ",
    ),
)
