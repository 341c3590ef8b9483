"""Runs moto so that it checks permissions by resource, as Amazon does, and rejects requests in JSON.

By itself, moto checks DynamoDB and Kinesis only against the resource "*", and rejects requests in XML. This server
prints each requested permission as a line: `RIGHT`, then the action, the resource and the decision as JSON.
"""

import json
import os
import sys
from typing import Any, NoReturn

from moto.core.exceptions import JsonRESTError
from moto.dynamodb.responses import DynamoHandler
from moto.iam.access_control import IAMRequest, IAMRequestBase
from moto.kinesis.responses import KinesisResponse
from moto.kinesis.utils import decompose_shard_iterator
from moto.server import main

_judged = IAMRequestBase.check_action_permitted


def _table(self: Any) -> str:  # noqa: ANN401  moto types no parameters
    name = self.body.get("TableName") or next(iter(self.body["RequestItems"]))
    return f"arn:aws:dynamodb:{self.region}:{self.current_account}:table/{name}"


def _stream(self: Any) -> str:  # noqa: ANN401  likewise
    asked = self._get_param
    name, consumer = asked("StreamName"), asked("ConsumerName")
    if iterator := asked("ShardIterator"):
        name = decompose_shard_iterator(iterator)[0]
    arn = asked("ConsumerARN") or asked("StreamARN")
    arn = arn or f"arn:aws:kinesis:{self.region}:{self.current_account}:stream/{name}"
    described = self._get_action() == "DescribeStreamConsumer" and consumer
    return f"{arn}/consumer/{consumer}:1" if described else str(arn)


def _check(self: IAMRequestBase, resource: str) -> None:
    granted = False
    try:
        _judged(self, resource)
        granted = True
    finally:
        if self._service in {"dynamodb", "kinesis"}:
            # Write the line at once. Moto responds in several threads, whose lines `print` would mix.
            os.write(sys.stdout.fileno(), f"RIGHT {json.dumps([self._action, resource, granted])}\n".encode())


def _refuse(self: IAMRequestBase) -> NoReturn:
    message = f"User: {self._access_key.arn} is not authorized to perform: {self._action}"
    raise JsonRESTError("AccessDeniedException", message)


DynamoHandler._determine_resource = _table  # type: ignore[attr-defined]  # noqa: SLF001  the name that moto looks for
KinesisResponse._determine_resource = _stream  # type: ignore[attr-defined]  # noqa: SLF001  likewise
IAMRequestBase.check_action_permitted = _check  # type: ignore[method-assign]
IAMRequest._raise_access_denied = _refuse  # type: ignore[method-assign]  # noqa: SLF001  likewise

if __name__ == "__main__":
    main()
