"""Tests which AWS credentials a URL selects: a profile, a role in another account, or the caller's own session."""

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs

import boto3
import pytest
from botocore.exceptions import EndpointConnectionError, ReadTimeoutError
from urllib3.connection import HTTPConnection
from urllib3.exceptions import NewConnectionError

from leasehold.adapters.multilang.credentials import parse_credentials
from leasehold.adapters.sources.kinesis.clients import create_client
from leasehold.adapters.sources.urls import open_source
from leasehold.stores.aws import connection_failure_hint, create_boto3_session, create_botocore_session
from leasehold.stores.urls import open_store

ROLE = "arn:aws:iam::123456789012:role/reader"
CONFIG = """[profile team]
region = eu-north-1
retry_mode = adaptive
aws_access_key_id = AKIATEAM
aws_secret_access_key = team
"""
ANSWER = """<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult><Credentials>
<AccessKeyId>ASIAROLE</AccessKeyId><SecretAccessKey>role</SecretAccessKey><SessionToken>token</SessionToken>
<Expiration>2999-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleResult></AssumeRoleResponse>"""

RoleRequests = list[tuple[str, dict[str, list[str]]]]


@pytest.fixture
def sts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RoleRequests]:
    """Run a fake STS, and record the requests for roles."""
    requests: RoleRequests = []

    class Roles(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            requests.append((self.headers["Authorization"], parse_qs(body)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(ANSWER.encode())

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Roles)
    Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "config").write_text(CONFIG)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "AKIAENVIRONMENT"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("AWS_CONFIG_FILE", str(tmp_path / "config")),
        ("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none")),
        ("AWS_DEFAULT_REGION", "eu-west-1"),
        ("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{server.server_port}"),
    ):
        monkeypatch.setenv(name, value)
    yield requests
    server.shutdown()
    server.server_close()


def _key(session: boto3.Session | None) -> str:
    assert session is not None
    credentials: Any = session.get_credentials()
    return str(credentials.get_frozen_credentials().access_key)


def test_a_profile_in_a_url_overrides_the_environment(sts: RoleRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    session = create_boto3_session({"profile": "team"})
    client = create_client("kinesis", None, None, 5.0, session)
    assert (_key(session), client.meta.region_name) == ("AKIATEAM", "eu-north-1")
    # A client has no public attribute for its credentials.
    assert client._request_signer._credentials.access_key == "AKIATEAM"  # noqa: SLF001
    assert create_boto3_session({}) is None
    assert sts == []


@pytest.mark.parametrize("profile", [None, "team"])
def test_a_role_is_assumed_on_first_use_with_its_external_id(sts: RoleRequests, profile: str | None) -> None:
    options = {"role_arn": ROLE, "external_id": "x-17"} | ({} if profile is None else {"profile": profile})
    session = create_boto3_session(options)
    client = create_client("kinesis", "eu-west-1", None, 5.0, session)
    assert sts == []
    assert _key(session) == "ASIAROLE"
    signed = client._request_signer._credentials.get_frozen_credentials()  # noqa: SLF001
    assert (signed.access_key, signed.token) == ("ASIAROLE", "token")
    # Two clients cause one request, because the credentials are shared until they expire.
    ((authorization, query),) = sts
    assert (query["RoleArn"], query["ExternalId"], query["RoleSessionName"]) == ([ROLE], ["x-17"], ["leasehold"])
    assert ("AKIATEAM" if profile else "AKIAENVIRONMENT") in authorization


@pytest.mark.usefixtures("sts")
def test_a_callers_session_serves_source_and_store() -> None:
    session = boto3.Session("AKIAOWN", "own", region_name="eu-south-1")
    source: Any = open_source("kinesis://orders", session=session)
    client = source._clients.client_with_timeout(5.0)  # noqa: SLF001
    assert (client.meta.region_name, client._request_signer._credentials.access_key) == ("eu-south-1", "AKIAOWN")  # noqa: SLF001
    source.close()
    with pytest.raises(ValueError, match=r"^source URL: pass either a session, or profile, role_arn "):
        open_source("kinesis://orders?profile=team", session=session)
    with pytest.raises(ValueError, match=r"^store URL: pass either a session, or profile, role_arn "):
        open_store(f"dynamodb://leases?role_arn={ROLE}", session=session)
    with pytest.raises(ValueError, match=r"^store URL: a boto3 session can only be used with an AWS "):
        open_store("memory://leases", session=session)
    with pytest.raises(ValueError, match=r"^store URL: a boto3 session can only be used with an AWS "):
        open_store("azblob://account/leases", session=session)


@pytest.mark.parametrize(
    "address", ["kinesis://orders", "dynamodb-streams://orders", "dynamodb://orders", "s3://orders"]
)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("profile=tema", r"option 'profile': AWS's configuration has no profile 'tema'$"),
        ("role_arn=reader", r"option 'role_arn' must be arn:aws:iam::ACCOUNT:role/NAME$"),
        ("external_id=x", r"option 'external_id' needs option 'role_arn'$"),
    ],
)
@pytest.mark.usefixtures("sts")
def test_a_meaningless_url_option_is_rejected(address: str, options: str, message: str) -> None:
    """An option that has no effect is an error. It must not lead to the use of the environment's credentials."""
    open_url = open_store if address.startswith(("dynamodb:", "s3:")) else open_source
    with pytest.raises(ValueError, match=rf"^(store|source) URL: {message}"):
        open_url(f"{address}?{options}")


@pytest.mark.parametrize(
    "address", ["kinesis://orders", "dynamodb-streams://orders", "dynamodb://orders", "s3://orders"]
)
@pytest.mark.parametrize("variable", ["AWS_PROFILE", "AWS_DEFAULT_PROFILE"])
@pytest.mark.usefixtures("sts")
def test_a_missing_profile_of_the_environment_is_reported(
    address: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "tema")
    open_url = open_store if address.startswith(("dynamodb:", "s3:")) else open_source
    with pytest.raises(
        ValueError, match=r"^environment variable AWS_PROFILE: AWS's configuration has no profile 'tema'$"
    ):
        open_url(address)


def test_the_providers_of_a_properties_file_are_tried_in_order(
    sts: RoleRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = f"software.amazon.awssdk.Unknown.KclSTSAssumeRoleSessionCredentialsProvider|{ROLE}|me|externalId=e-2"
    assert _key(parse_credentials("ProfileCredentialsProvider|team").session()) == "AKIATEAM"
    assert _key(parse_credentials(f"{role}|endpointRegion=us-west-2").session()) == "ASIAROLE"
    ((authorization, query),) = sts
    assert (query["RoleSessionName"], query["ExternalId"]) == (["me"], ["e-2"])
    assert "/us-west-2/sts/" in authorization
    either = "EnvironmentVariableCredentialsProvider, ProfileCredentialsProvider|team"
    assert _key(parse_credentials(either).session()) == "AKIAENVIRONMENT"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert _key(parse_credentials(either).session()) == "AKIATEAM"
    # Only this provider is tried, not the rest of the chain.
    session = parse_credentials("EnvironmentVariableCredentialsProvider").session()
    assert session is not None
    assert session.get_credentials() is None
    assert parse_credentials("DefaultCredentialsProvider").session() is None


def test_a_role_can_be_assumed_at_another_endpoint(sts: RoleRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch_context:
        endpoint = boto3.Session().client("sts").meta.endpoint_url
        patch_context.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:9")
        provider_line = f"StsAssumeRoleCredentialsProvider|{ROLE}|me|endpoint={endpoint}^eu-west-3"
        assert _key(parse_credentials(provider_line).session()) == "ASIAROLE"
    assert "/eu-west-3/sts/" in sts[0][0]


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("https://dynamodb.eu-nowhere-9.amazonaws.com/", " (is the region right?)"),
        ("http://localhost:4566/", ""),
    ],
)
def test_a_wrong_region_is_suggested_only_for_endpoints_of_aws(url: str, hint: str) -> None:
    """No region is suggested for a local endpoint that is down, because it has none."""
    assert connection_failure_hint(EndpointConnectionError(endpoint_url=url)) == hint
    assert connection_failure_hint(ReadTimeoutError(endpoint_url=url)) == ""


@pytest.mark.parametrize(
    ("cause", "hint"),
    [
        (socket.gaierror(-2, "Name or service not known"), " (Name or service not known; is the region right?)"),
        (OSError(24, "Too many open files"), " (Too many open files)"),
    ],
)
def test_hint_after_a_failed_connection_names_the_cause(cause: OSError, hint: str) -> None:
    wrapped = NewConnectionError(HTTPConnection("dynamodb"), "failed")
    wrapped.__cause__ = cause
    for error in (cause, wrapped):
        assert (
            connection_failure_hint(EndpointConnectionError(endpoint_url="https://x.amazonaws.com/", error=error))
            == hint
        )


@pytest.mark.usefixtures("sts")
def test_a_session_keeps_its_region_with_other_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile in a URL names the region also for a role, and the caller's session names it for its copies."""
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    session = create_boto3_session({"role_arn": ROLE, "profile": "team"})
    assert session is not None
    assert session.region_name == "eu-north-1"
    for own_session in (boto3.Session("AKIAOWN", "own", region_name="eu-south-1"), boto3.Session(profile_name="team")):
        copy = create_botocore_session(own_session)
        assert copy.get_config_variable("region") == own_session.region_name
    assert copy.get_scoped_config()["retry_mode"] == "adaptive"


@pytest.mark.usefixtures("sts")
def test_an_external_id_and_a_session_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="pass either a session, or profile"):
        create_boto3_session({"external_id": "x"}, session=boto3.Session("AKIAOWN", "own"))
