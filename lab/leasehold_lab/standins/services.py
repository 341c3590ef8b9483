"""Starts the stand-ins that need neither a license nor Java: dynalite, kinesis-local, azurite and moto."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path

from leasehold_lab.standins import guard
from leasehold_lab.standins.node import (
    HOST,
    LOCKS,
    Service,
    ServiceCommand,
    ensure_installed,
    find_free_port,
    find_node,
    run_service,
)

AZURITE_ACCOUNT = "devstoreaccount1"
# This key is public. It is documented by azurite, and valid only for azurite.
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

WRITING_SECONDS = 8.0
"""The time in seconds that azurite has to write its data when it is stopped."""

KINESIS_FILE = "streams.json"
"""The file in which kinesis-local keeps its streams. The file is truncated if the process is killed while writing."""


CERTIFICATE = "server.json"
"""The file in kinesis-local's package that contains its key and certificate."""


def run_dynalite(folder: Path | None = None) -> AbstractContextManager[Service]:
    """Run a stand-in for DynamoDB, with conditional writes but without transactions.

    If `folder` is given, tables are kept there.
    """
    script = str(ensure_installed("aws") / "dynalite" / "cli.js")
    delay_options = ("--createTableMs", "0", "--deleteTableMs", "0", "--updateTableMs", "0")
    persistence_options = () if folder is None else ("--path", str(folder))

    def build_command(port: int) -> ServiceCommand:
        return ServiceCommand(
            (*find_node().node, script, "--host", HOST, "--port", str(port), *delay_options, *persistence_options)
        )

    return run_service("dynalite", build_command)


def run_kinesis_local(folder: Path | None = None, *, tls_port: int | None = None) -> AbstractContextManager[Service]:
    """Run a stand-in for Kinesis, with closed shards, child shards and shard filters.

    The stand-in does not throttle requests, and has no fan-out that boto3 can use.

    Args:
        folder: The folder in which to keep streams. If the process is killed, the last second of changes is lost. By
            default, streams are kept in memory.
        tls_port: A port on which to serve TLS, in addition to the port for plain HTTP.
    """
    package = ensure_installed("aws") / "kinesis-local"
    stream_operations = ("CREATE_STREAM", "DELETE_STREAM", "MERGE_SHARDS", "SPLIT_SHARD", "UPDATE_SHARD_COUNT")
    consumer_operations = ("REGISTER_STREAM_CONSUMER", "DEREGISTER_STREAM_CONSUMER")

    persistence_options = {"SHOULD_PERSIST_DATA": "true", "PERSIST_FILE_NAME": KINESIS_FILE, "PERSIST_INTERVAL": "1s"}

    def build_command(port: int) -> ServiceCommand:
        env = {
            "KINESIS_MOCK_PLAIN_PORT": str(port),
            # kinesis-local always serves TLS, too, and reads its certificate from this file.
            "KINESIS_MOCK_TLS_PORT": str(tls_port or find_free_port()),
            "KINESIS_MOCK_CERT_PATH": str(package / CERTIFICATE),
            "SHARD_LIMIT": "4000",
            "LOG_LEVEL": "ERROR",
            **{f"{verb}_DURATION": "20ms" for verb in (*stream_operations, *consumer_operations)},
            **({} if folder is None else {**persistence_options, "PERSIST_PATH": str(folder)}),
        }
        # kinesis-local would listen on all interfaces, so this script makes it listen only on the loopback address.
        return ServiceCommand(
            (*find_node().node, "--require", str(LOCKS / "loopback.cjs"), str(package / "main.js")), env
        )

    return run_service("kinesis-local", build_command)


def run_azurite(folder: Path | None = None) -> AbstractContextManager[Service]:
    """Run a stand-in for Azure Blob Storage. Every path starts with the name of the account.

    If `folder` is given, blobs are kept there. They are written every few seconds, and when the service is stopped.
    """
    script = str(ensure_installed("azure") / "azurite" / "dist" / "src" / "blob" / "main.js")
    persistence_options = ("--inMemoryPersistence",) if folder is None else ("--location", str(folder))
    azurite_flags = ("--silent", "--disableTelemetry", "--skipApiVersionCheck", *persistence_options)

    def build_command(port: int) -> ServiceCommand:
        arguments = (*find_node().node, script, "--blobHost", HOST, "--blobPort", str(port), *azurite_flags)
        return ServiceCommand(arguments, {guard.GRACE: f"{WRITING_SECONDS:g}"})

    return run_service("azurite", build_command)


def azurite_connection_string(service: Service) -> str:
    """Return the connection string of this service for the Azure SDKs."""
    string_parts = {
        "DefaultEndpointsProtocol": "http",
        "AccountName": AZURITE_ACCOUNT,
        "AccountKey": AZURITE_KEY,
        "BlobEndpoint": f"{service.url}/{AZURITE_ACCOUNT}",
    }
    return ";".join(f"{name}={value}" for name, value in string_parts.items()) + ";"


def run_moto() -> AbstractContextManager[Service]:
    """Run stand-ins for many AWS services. Their conditional writes are not atomic, so don't use them to test races."""

    def build_command(port: int) -> ServiceCommand:
        return ServiceCommand((sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)))

    return run_service("moto", build_command)
