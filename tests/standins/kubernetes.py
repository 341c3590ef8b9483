"""Runs the API server of Kubernetes with KEDA's resources. It is built once per machine from their Go modules.

No controller runs, so the server accepts and validates objects, but starts nothing. Only KEDA's definitions are
installed, not its operator, which would read a trigger's metadata and query its value.
"""

import hashlib
import json
import os
import secrets
import shutil
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import frozen

from leasehold.adapters.toolchain import ServiceError, fill_once
from leasehold_lab.standins.node import POLL_SECONDS, ServiceCommand, run_service
from standins.go_tool import fetched, run_go

PROGRAM = Path(__file__).parent / "go"
BINARY = "kube-api-on-loopback"
KEDA = "github.com/kedacore/keda/v2@v2.21.0"
KEDA_SUM = "h1:R6z2HZvstK4RLUMxroNACzBj74xGxt3kG59b5Xc+Xps="
DEFINITION = "config/crd/bases/keda.sh_scaledobjects.yaml"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
READY_SECONDS = 120.0
ANSWER_SECONDS = 30.0


@frozen
class KubernetesApi:
    """A running API server.

    Attributes:
        port: The port on which the server listens with TLS.
        token: The bearer token that each request must have.
        certificate: The server's self-signed certificate.
    """

    port: int
    token: str
    certificate: Path

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        """Send a request. Return the status of the response, and its JSON object."""
        ssl_context = ssl.create_default_context(cafile=str(self.certificate))
        ssl_context.check_hostname = False  # only this server has this certificate
        connection = HTTPSConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS, context=ssl_context)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            response_body = response.read()
        finally:
            connection.close()
        return response.status, json.loads(response_body) if response_body.startswith(b"{") else {}

    def create(self, manifest: Mapping[str, Any]) -> tuple[int, str]:
        """Create this object; the server rejects unknown fields. Return the response's status and message."""
        group, kind = manifest["apiVersion"], manifest["kind"].lower() + "s"
        root = "/api/v1" if group == "v1" else f"/apis/{group}"
        status, response_body = self.ask("POST", f"{root}/namespaces/default/{kind}?fieldValidation=Strict", manifest)
        return status, str(response_body.get("message", ""))


@contextmanager
def tried_on_kubernetes(subject: str) -> Iterator[KubernetesApi]:
    """Run an empty cluster's API, or skip the test of `subject` if the user has not allowed the long build."""
    if "LEASEHOLD_KUBERNETES" not in os.environ:
        pytest.skip(f"{subject} NOT TRIED ON KUBERNETES: set LEASEHOLD_KUBERNETES=1 to build it (ten minutes)")
    with ExitStack() as stack:
        try:
            api = stack.enter_context(kubernetes())
        except ServiceError as error:
            pytest.skip(f"{subject} NOT TRIED ON KUBERNETES: {error}")
        yield api


@contextmanager
def kubernetes() -> Iterator[KubernetesApi]:
    """Run an empty cluster's API that knows KEDA's ScaledObject.

    Raises ServiceError if go is missing, or with go's output if the build fails.
    """
    folder, token = fill_once(f"kube-api-{_digest()}", _build, shared=True), secrets.token_hex()

    def command(port: int) -> ServiceCommand:
        return ServiceCommand((str(folder / BINARY), str(port)), {"TOKEN": token})

    with run_service("kube-api", command, READY_SECONDS) as service:
        api = KubernetesApi(service.port, token, service.log.parent / "certificates" / "apiserver.crt")
        _until("it is ready", lambda: api.ask("GET", "/readyz")[0] == 200)
        definition = yaml.safe_load((folder / "scaledobjects.yaml").read_text())
        status, response_body = api.ask("POST", DEFINITIONS, definition)
        if status != 201:
            raise ServiceError(f"kube-api does not take KEDA's definition: {response_body.get('message')}")
        name = definition["metadata"]["name"]
        _until("it serves ScaledObjects", lambda: _served(api.ask("GET", f"{DEFINITIONS}/{name}")[1]))
        yield api


def _served(definition: Mapping[str, Any]) -> bool:
    conditions = definition.get("status", {}).get("conditions") or ()
    return any(condition["type"] == "Established" and condition["status"] == "True" for condition in conditions)


def _until(expectation: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise ServiceError(f"kube-api: {expectation} within {READY_SECONDS:g} s was hoped for")
        time.sleep(POLL_SECONDS)


def _digest() -> str:
    sources = b"".join((PROGRAM / name).read_bytes() for name in ("main.go", "go.mod", "go.sum"))
    return hashlib.sha256(sources + KEDA_SUM.encode()).hexdigest()[:12]


def _build(folder: Path) -> None:
    print("leasehold: building Kubernetes's API server with go, once (minutes) ...", file=sys.stderr, flush=True)  # noqa: T201  progress
    with tempfile.TemporaryDirectory(prefix="leasehold-go-") as temporary_folder:
        keda = fetched("KEDA", Path(temporary_folder), KEDA, KEDA_SUM)
        shutil.copy(keda / DEFINITION, folder / "scaledobjects.yaml")
        project = shutil.copytree(PROGRAM, Path(temporary_folder) / "go")
        run_go("Kubernetes's API server", project, "build", "-o", str(folder / BINARY), ".")
