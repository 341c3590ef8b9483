"""The stand-ins that need no license and no Java: dynalite, kinesis-local, azurite and moto."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path

from leasehold_lab.standins import guard
from leasehold_lab.standins.node import HOST, LOCKS, Command, Service, find_node, free_port, installed, serving

AZURITE_ACCOUNT = "devstoreaccount1"
# Published by the makers of azurite for everyone's use; it is valid for azurite only.
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

WRITING_SECONDS = 8.0
"""How long azurite may take to write its data when it is stopped."""

KINESIS_FILE = "streams.json"
"""The file in which kinesis-local keeps its streams. If it is ended while it writes, the file is truncated."""


CERTIFICATE = "server.json"
"""The file with kinesis-local's own key and certificate, in the folder of its package."""


def dynalite(folder: Path | None = None) -> AbstractContextManager[Service]:
    """Run tables of DynamoDB, with conditional writes but without transactions, kept in `folder` if given."""
    script = str(installed("aws") / "dynalite" / "cli.js")
    quick = ("--createTableMs", "0", "--deleteTableMs", "0", "--updateTableMs", "0")
    persistence = () if folder is None else ("--path", str(folder))

    def command(port: int) -> Command:
        return Command((*find_node().node, script, "--host", HOST, "--port", str(port), *quick, *persistence))

    return serving("dynalite", command)


def kinesis_local(folder: Path | None = None, *, tls_port: int | None = None) -> AbstractContextManager[Service]:
    """Run Kinesis with shard ends, child shards and shard filters, but without throttling, or fan-out by boto3.

    Args:
        folder: Where to keep streams; after a kill they are as of a second before. By default they are not kept.
        tls_port: A port on which to serve TLS as well.
    """
    package = installed("aws") / "kinesis-local"
    verbs = ("CREATE_STREAM", "DELETE_STREAM", "MERGE_SHARDS", "SPLIT_SHARD", "UPDATE_SHARD_COUNT")
    consumers = ("REGISTER_STREAM_CONSUMER", "DEREGISTER_STREAM_CONSUMER")

    options = {"SHOULD_PERSIST_DATA": "true", "PERSIST_FILE_NAME": KINESIS_FILE, "PERSIST_INTERVAL": "1s"}

    def command(port: int) -> Command:
        env = {
            "KINESIS_MOCK_PLAIN_PORT": str(port),
            # It insists on serving TLS besides plain HTTP, and reads the certificate from this file.
            "KINESIS_MOCK_TLS_PORT": str(tls_port or free_port()),
            "KINESIS_MOCK_CERT_PATH": str(package / CERTIFICATE),
            "SHARD_LIMIT": "4000",
            "LOG_LEVEL": "ERROR",
            **{f"{verb}_DURATION": "20ms" for verb in (*verbs, *consumers)},
            **({} if folder is None else {**options, "PERSIST_PATH": str(folder)}),
        }
        # By default it listens on every interface of the machine.
        return Command((*find_node().node, "--require", str(LOCKS / "loopback.cjs"), str(package / "main.js")), env)

    return serving("kinesis-local", command)


def azurite(folder: Path | None = None) -> AbstractContextManager[Service]:
    """Run a stand-in for Azure Blob Storage. The account's name is the first part of every path.

    If `folder` is given they are kept there: written every few seconds and, unless it is killed, at the end.
    """
    script = str(installed("azure") / "azurite" / "dist" / "src" / "blob" / "main.js")
    persistence = ("--inMemoryPersistence",) if folder is None else ("--location", str(folder))
    flags = ("--silent", "--disableTelemetry", "--skipApiVersionCheck", *persistence)

    def command(port: int) -> Command:
        words = (*find_node().node, script, "--blobHost", HOST, "--blobPort", str(port), *flags)
        return Command(words, {guard.GRACE: f"{WRITING_SECONDS:g}"})

    return serving("azurite", command)


def azurite_connection_string(service: Service) -> str:
    """Return the connection string with which the Azure SDKs reach this azurite."""
    parts = {
        "DefaultEndpointsProtocol": "http",
        "AccountName": AZURITE_ACCOUNT,
        "AccountKey": AZURITE_KEY,
        "BlobEndpoint": f"{service.url}/{AZURITE_ACCOUNT}",
    }
    return ";".join(f"{name}={value}" for name, value in parts.items()) + ";"


def moto() -> AbstractContextManager[Service]:
    """Run many of Amazon's services, but without atomic conditional writes, so races must not be tested with it."""

    def command(port: int) -> Command:
        return Command((sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)))

    return serving("moto", command)
