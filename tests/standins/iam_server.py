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

_original_check = IAMRequestBase.check_action_permitted


def _find_table_arn(self: Any) -> str:  # noqa: ANN401  moto types no parameters
    name = self.body.get("TableName") or next(iter(self.body["RequestItems"]))
    return f"arn:aws:dynamodb:{self.region}:{self.current_account}:table/{name}"


def _find_resource_arn(self: Any) -> str:  # noqa: ANN401  likewise
    get_parameter = self._get_param
    name, consumer = get_parameter("StreamName"), get_parameter("ConsumerName")
    if iterator := get_parameter("ShardIterator"):
        name = decompose_shard_iterator(iterator)[0]
    arn = get_parameter("ConsumerARN") or get_parameter("StreamARN")
    arn = arn or f"arn:aws:kinesis:{self.region}:{self.current_account}:stream/{name}"
    is_consumer_description = self._get_action() == "DescribeStreamConsumer" and consumer
    return f"{arn}/consumer/{consumer}:1" if is_consumer_description else str(arn)


def _check_and_print(self: IAMRequestBase, resource: str) -> None:
    granted = False
    try:
        _original_check(self, resource)
        granted = True
    finally:
        if self._service in {"dynamodb", "kinesis"}:
            # Write the line at once. Moto responds in several threads, whose lines `print` would mix.
            os.write(sys.stdout.fileno(), f"RIGHT {json.dumps([self._action, resource, granted])}\n".encode())


def _reject_in_json(self: IAMRequestBase) -> NoReturn:
    message = f"User: {self._access_key.arn} is not authorized to perform: {self._action}"
    raise JsonRESTError("AccessDeniedException", message)


DynamoHandler._determine_resource = _find_table_arn  # type: ignore[attr-defined]  # noqa: SLF001  the name that moto looks for
KinesisResponse._determine_resource = _find_resource_arn  # type: ignore[attr-defined]  # noqa: SLF001  likewise
IAMRequestBase.check_action_permitted = _check_and_print  # type: ignore[method-assign]
IAMRequest._raise_access_denied = _reject_in_json  # type: ignore[method-assign]  # noqa: SLF001  likewise

if __name__ == "__main__":
    main()
