"""Opens a producer from a URL and options, for `leasehold produce` and for Python."""

from collections.abc import Callable
from typing import cast, get_args

import boto3

from leasehold.adapters.options import ProduceOptions, check_options
from leasehold.adapters.sources.kinesis.clients import WireFormat
from leasehold.adapters.sources.kinesis.producer.core import Settings
from leasehold.adapters.sources.kinesis.producer.producer import Producer, create_producer_clients
from leasehold.adapters.sources.kinesis.stream_arn import parse_stream_address
from leasehold.stores.aws import create_boto3_session
from leasehold.stores.urls import AWS_OPTIONS, Scheme, check_endpoint, split_url

PARALLEL_REQUESTS = 4

_SCHEMES = {"kinesis": Scheme("", AWS_OPTIONS | {"wire"})}


def open_producer(
    source: str,
    options: ProduceOptions,
    option_label: Callable[[str], str] = str,
    *,
    session: boto3.Session | None = None,
) -> Producer:
    """Check the options, and open the producer that they describe. Opening it requests the stream's description.

    Args:
        source: The stream to write to, as a URL.
        options: The options.
        option_label: Returns an option's name as the caller's user writes it, for error messages.
        session: A boto3 session with the credentials; by default those of the URL or of the environment.

    Raises:
        ValueError: The URL or an option is wrong. The message says why and never repeats the URL.
        TypeError: There is no such option.
        SourceError: The stream cannot be used.
        SourceUnavailable: The stream does not respond.
    """
    # Messages never repeat the URL, which may contain a secret.
    _, stream, url_options = split_url(source, "SOURCE", _SCHEMES)
    address = parse_stream_address(stream, url_options.get("region"), "SOURCE URL")
    if not address.name or "/" in address.name:
        raise ValueError("SOURCE URL: write kinesis://STREAM?region=…")
    if (wire_format := url_options.get("wire", "cbor")) not in get_args(WireFormat):
        raise ValueError("SOURCE URL: option 'wire' must be cbor, json or boto3; without it, records are sent in CBOR")
    endpoint = check_endpoint(url_options.get("endpoint"), "SOURCE URL")
    credentials = create_boto3_session(url_options, "SOURCE URL", session)
    _, option_values = check_options(ProduceOptions, options, option_label)
    settings = Settings(
        linger_seconds=option_values["linger_ms"] / 1000,
        share=option_values["share"],
        time_to_live_seconds=option_values["time_to_live"],
        on_late=option_values["on_late"],
        epoch=option_values["epoch"],
    )
    clients = create_producer_clients(
        address.region,
        endpoint,
        PARALLEL_REQUESTS,
        cast("WireFormat", wire_format),
        session=credentials,
        arn=address.arn,
    )
    return Producer(clients, address.name, settings)
