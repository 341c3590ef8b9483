"""A local account of Amazon's that enforces rights, with users, policies, streams and tables."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import boto3
from attrs import Factory, frozen

from leasehold_lab.standins.node import HOST, Service, ServiceCommand, run_service

REGION, ACCOUNT = "eu-west-1", "123456789012"
Document = Mapping[str, Any]
"""A policy as in its JSON form."""


def allowed(action: str) -> Document:
    """Return the policy that allows this action, or those that it matches, everywhere."""
    return {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": action, "Resource": "*"}]}


ALL = allowed("*")


@frozen
class Account:
    """The account, and the session of a user with all rights."""

    service: Service
    admin: boto3.Session
    _numbers: Iterator[int] = Factory(count)
    _clients: dict[str, Any] = Factory(dict)

    def client(self, name: str) -> Any:  # noqa: ANN401  each service has its own
        """Return a client of this service that has all rights."""
        if name not in self._clients:
            session: Any = self.admin  # typed by the services that boto3 knows
            self._clients[name] = session.client(name, endpoint_url=self.service.url, region_name=REGION)
        return self._clients[name]

    def user(self, *policies: Document) -> tuple[str, str]:
        """Return the access key and the secret of a new user with these policies and no other right."""
        return _user(self.client("iam"), f"user-{next(self._numbers)}", policies)

    def role(self, name: str, policy: Document, external_id: str) -> str:
        """Return the ARN of a new role with this policy, for callers that give this external id."""
        trust = {"StringEquals": {"sts:ExternalId": external_id}}
        allowed = {"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": "sts:AssumeRole", "Condition": trust}
        trusting = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
        created = self.client("iam").create_role(RoleName=name, AssumeRolePolicyDocument=trusting)["Role"]["Arn"]
        self.client("iam").put_role_policy(RoleName=name, PolicyName="policy", PolicyDocument=json.dumps(policy))
        return str(created)

    def asked(self) -> list[tuple[str, str, bool]]:
        """Return each right requested so far, with the action, the resource, and whether it was granted."""
        lines = self.service.log.read_text(errors="replace").splitlines()
        return [tuple(json.loads(line.removeprefix("RIGHT "))) for line in lines if line.startswith("RIGHT ")]


@contextmanager
def account() -> Iterator[Account]:
    """Run an account that judges rights on DynamoDB and Kinesis by action and resource, ignoring conditions and KMS."""
    script = str(Path(__file__).with_name("iam_server.py"))

    def command(port: int) -> ServiceCommand:
        # Three requests create the user with all rights; from then on every request needs a right.
        return ServiceCommand(
            (sys.executable, script, "-H", HOST, "-p", str(port)), {"INITIAL_NO_AUTH_ACTION_COUNT": "3"}
        )

    with run_service("moto-iam", command) as service:
        key, secret = _user(boto3.client("iam", endpoint_url=service.url, region_name=REGION), "admin", (ALL,))
        yield Account(service, boto3.Session(key, secret))


def _user(iam: Any, name: str, policies: tuple[Document, ...]) -> tuple[str, str]:  # noqa: ANN401  a client of IAM
    iam.create_user(UserName=name)
    for number, policy in enumerate(policies):
        iam.put_user_policy(UserName=name, PolicyName=f"policy-{number}", PolicyDocument=json.dumps(policy))
    created = iam.create_access_key(UserName=name)["AccessKey"]
    return created["AccessKeyId"], created["SecretAccessKey"]
