"""A local AWS account that enforces permissions, with users, policies, streams and tables."""

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
"""A policy document, as parsed from JSON."""


def allowed(action: str) -> Document:
    """Return a policy that allows this action on all resources. The action may be a pattern."""
    return {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": action, "Resource": "*"}]}


ALL = allowed("*")


@frozen
class Account:
    """The account, with a session of a user who has all permissions."""

    service: Service
    admin: boto3.Session
    _numbers: Iterator[int] = Factory(count)
    _clients: dict[str, Any] = Factory(dict)

    def client(self, name: str) -> Any:  # noqa: ANN401  each service has its own
        """Return a client for this service that has all permissions."""
        if name not in self._clients:
            session: Any = self.admin  # boto3's types accept only literal names of services
            self._clients[name] = session.client(name, endpoint_url=self.service.url, region_name=REGION)
        return self._clients[name]

    def user(self, *policies: Document) -> tuple[str, str]:
        """Create a user with only the permissions of these policies. Return its access key and secret."""
        return _user(self.client("iam"), f"user-{next(self._numbers)}", policies)

    def role(self, name: str, policy: Document, external_id: str) -> str:
        """Create a role with this policy, and return its ARN. Callers must give this external id."""
        condition = {"StringEquals": {"sts:ExternalId": external_id}}
        statement = {"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": "sts:AssumeRole", "Condition": condition}
        trust_policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        arn = self.client("iam").create_role(RoleName=name, AssumeRolePolicyDocument=trust_policy)["Role"]["Arn"]
        self.client("iam").put_role_policy(RoleName=name, PolicyName="policy", PolicyDocument=json.dumps(policy))
        return str(arn)

    def asked(self) -> list[tuple[str, str, bool]]:
        """Return the permissions that were requested so far: action, resource, and whether it was granted."""
        lines = self.service.log.read_text(errors="replace").splitlines()
        return [tuple(json.loads(line.removeprefix("RIGHT "))) for line in lines if line.startswith("RIGHT ")]


@contextmanager
def account() -> Iterator[Account]:
    """Run an account that checks permissions by action and resource. It ignores conditions and KMS."""
    script = str(Path(__file__).with_name("iam_server.py"))

    def command(port: int) -> ServiceCommand:
        # The first three requests create the user with all permissions. After that, every request needs a permission.
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
    access_key = iam.create_access_key(UserName=name)["AccessKey"]
    return access_key["AccessKeyId"], access_key["SecretAccessKey"]
