"""The hooks of a producer: its records go in CBOR past boto3's serializer, which would put them into base64.

Rule 4: a service proves by its listing of shards, which does no harm, that it speaks CBOR; until then records go in
JSON. Rule 5: records are repeated in JSON only where they were refused whole; what may have been written is not.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import orjson

from leasehold.adapters.sources.kinesis.faults import SERVER_ERROR
from leasehold.adapters.sources.kinesis.wire.forms import CBOR, Unreadable, as_json, is_cbor, packed
from leasehold.adapters.sources.kinesis.wire.hooks import UNREAD, Handlers, Told, Wire, refused

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_kinesis import KinesisClient

_KEPT = "leasehold keeps the records"
_STAND_IN = [{"Data": b"", "PartitionKey": "-"}]


class PutRows(list[Any]):
    """The rows of a PutRecords whose keys were checked: boto3 need not look at them one by one."""


class PutWire(Wire):
    """How a producer's client and its service speak about its records; other lists of records are left to boto3.

    client  any of boto3's; it is changed
    cbor    whether to speak in CBOR
    """

    def __init__(self, client: "KinesisClient", *, cbor: bool) -> None:
        super().__init__(client, cbor=cbor)
        keep = cast("Callable[..., None]", self._keep)  # the stubs do not know that its answer counts
        client.meta.events.register("provide-client-params.kinesis.PutRecords", keep)

    def _handlers(self) -> Handlers:
        return {"ListShards": (self._ask, self._rewrite), "PutRecords": (self._put, self._rewrite)}

    def _keep(self, params: Told, context: Told, **_event: object) -> Told | None:
        """Withhold rows from boto3's serializer; what else is asked is its own."""
        rows = params.get("Records")
        if not self._asks_cbor or "ListShards" not in self._proved or not isinstance(rows, PutRows):
            return None
        if not rows or not all(isinstance(row["Data"], bytes) for row in rows):  # boto3 says what is wrong with it
            return None
        context[_KEPT] = rows
        return {**params, "Records": _STAND_IN}

    def _put(self, params: Told, context: Told, **_event: object) -> None:
        if (rows := context.get(_KEPT)) is not None:
            params["body"] = packed({**orjson.loads(params["body"]), "Records": rows})
            params["headers"]["Content-Type"] = CBOR

    def _rewrite(self, response_dict: Told, customized_response_dict: Told, **_event: object) -> None:
        """Give boto3 the answer in JSON: there is little of it."""
        if refused(response_dict) or not is_cbor(response_dict["headers"].get("content-type")):
            return
        try:
            response_dict["body"] = as_json(response_dict["body"])
        except Unreadable as odd:
            customized_response_dict[UNREAD], response_dict["body"] = str(odd), b"{}"

    def _judge(self, response: Any, request_dict: Told, operation: Any, **event: object) -> int | None:  # noqa: ANN401  of boto3
        if operation.name == "PutRecords" and response is not None:
            http, parsed = response
            if UNREAD in parsed:
                self._fall_back(f"its answer cannot be read: {parsed[UNREAD]}")
            if UNREAD in parsed or http.status_code >= SERVER_ERROR:
                return None
        return super()._judge(response, request_dict, operation, **event)
