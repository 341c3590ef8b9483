"""An account of Amazon's with its rights enforced: users of policies, streams and tables, on this machine."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import boto3
from attrs import Factory, frozen

from leasehold_lab.standins.node import HOST, Command, Service, serving

REGION, ACCOUNT = "eu-west-1", "123456789012"
Document = Mapping[str, Any]
"""A policy, as its JSON says."""


def allowed(action: str) -> Document:
    """The policy that allows this action, or those that it matches, everywhere."""
    return {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": action, "Resource": "*"}]}


ALL = allowed("*")


@frozen
class Account:
    """The account, and the session of who may do everything in it."""

    service: Service
    admin: boto3.Session
    _numbers: Iterator[int] = Factory(count)
    _clients: dict[str, Any] = Factory(dict)

    def client(self, name: str) -> Any:  # noqa: ANN401  each service has its own
        """A client of this service that may do everything."""
        if name not in self._clients:
            session: Any = self.admin  # typed by the services that it knows
            self._clients[name] = session.client(name, endpoint_url=self.service.url, region_name=REGION)
        return self._clients[name]

    def user(self, *policies: Document) -> tuple[str, str]:
        """The access key and the secret of a new user with these policies and no other right."""
        return _user(self.client("iam"), f"user-{next(self._numbers)}", policies)

    def role(self, name: str, policy: Document, external_id: str) -> str:
        """The ARN of a new role with this policy, for whoever says this external id."""
        trust = {"StringEquals": {"sts:ExternalId": external_id}}
        allowed = {"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": "sts:AssumeRole", "Condition": trust}
        trusting = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
        made = self.client("iam").create_role(RoleName=name, AssumeRolePolicyDocument=trusting)["Role"]["Arn"]
        self.client("iam").put_role_policy(RoleName=name, PolicyName="policy", PolicyDocument=json.dumps(policy))
        return str(made)

    def asked(self) -> list[tuple[str, str, bool]]:
        """Each right asked for so far: the action, the resource, and whether it was granted."""
        lines = self.service.log.read_text(errors="replace").splitlines()
        return [tuple(json.loads(line.removeprefix("RIGHT "))) for line in lines if line.startswith("RIGHT ")]


@contextmanager
def account() -> Iterator[Account]:
    """Rights of DynamoDB and Kinesis are judged by action and resource; conditions are not, nor is KMS."""
    script = str(Path(__file__).with_name("iam_server.py"))

    def command(port: int) -> Command:
        # Three requests make who may do everything; from then on nothing is done without a right.
        return Command((sys.executable, script, "-H", HOST, "-p", str(port)), {"INITIAL_NO_AUTH_ACTION_COUNT": "3"})

    with serving("moto-iam", command) as service:
        key, secret = _user(boto3.client("iam", endpoint_url=service.url, region_name=REGION), "admin", (ALL,))
        yield Account(service, boto3.Session(key, secret))


def _user(iam: Any, name: str, policies: tuple[Document, ...]) -> tuple[str, str]:  # noqa: ANN401  a client of IAM
    iam.create_user(UserName=name)
    for number, policy in enumerate(policies):
        iam.put_user_policy(UserName=name, PolicyName=f"policy-{number}", PolicyDocument=json.dumps(policy))
    made = iam.create_access_key(UserName=name)["AccessKey"]
    return made["AccessKeyId"], made["SecretAccessKey"]
