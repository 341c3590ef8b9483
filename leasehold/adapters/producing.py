"""Opens a producer from a URL and options, for `leasehold produce` and for Python."""

import logging
from collections.abc import Callable
from typing import Any, Literal, TypedDict, cast, get_args, get_type_hints

import boto3

from leasehold.adapters.inputs import checked_duration, seconds_of
from leasehold.adapters.sources.kinesis.clients import WireForm
from leasehold.adapters.sources.kinesis.producer.core import Settings
from leasehold.adapters.sources.kinesis.producer.producer import Producer, clients_of
from leasehold.adapters.sources.kinesis.records import EPOCHS
from leasehold.adapters.sources.kinesis.stream_arn import stream_address
from leasehold.stores.aws import session_of
from leasehold.stores.printable import did_you_mean, escaped
from leasehold.stores.urls import AWS, Scheme, endpoint_of, read_url

log = escaped(logging.getLogger("leasehold.producer"))

REQUESTS = 4
LINGER_MS_MAX = 86_400_000

_SCHEMES = {"kinesis": Scheme("", AWS | {"wire"})}


class ProduceOptions(TypedDict, total=False):
    """The options of `leasehold produce` that are not about lines, by the same names; None stands for the default.

    linger_ms     how long a record may wait for company. [100]
    share         of each shard's write rate, at most; 1 is all of it. [1]
    time_to_live  seconds, or a duration, after which a record is late. [30]
    on_late       block: it keeps its place; fail: it is given up. [block]
    epoch         mark each record with this number and a counter
    """

    linger_ms: int | None
    share: float | None
    time_to_live: float | str | None
    on_late: Literal["block", "fail"] | None
    epoch: int | None


def open_producer(
    source: str,
    options: ProduceOptions,
    named: Callable[[str], str] = str,
    *,
    session: boto3.Session | None = None,
) -> Producer:
    """Check the options and open the producer that they describe, which reads its stream's description first.

    Args:
        source: The stream to write to, as a URL.
        options: The options.
        named: Returns an option's name as the caller's user writes it, for error messages.
        session: A boto3 session with the credentials; None: those of the URL or of the environment.

    Raises:
        ValueError: The URL or an option is wrong. The message says why and never repeats the URL.
        TypeError: There is no such option.
        SourceError: The stream cannot be used.
        SourceUnavailable: The stream does not respond.
    """
    # Messages never repeat the URL, which may contain a secret.
    _, stream, place = read_url(source, "SOURCE", _SCHEMES)
    address = stream_address(stream, place.get("region"), "SOURCE URL")
    if not address.name or "/" in address.name:
        raise ValueError("SOURCE URL: write kinesis://STREAM?region=…")
    if (wire := place.get("wire", "cbor")) not in get_args(WireForm):
        raise ValueError("SOURCE URL: option 'wire' wants cbor, json or boto3; without it records are sent in CBOR")
    endpoint = endpoint_of(place.get("endpoint"), "SOURCE URL")
    credentials = session_of(place, "SOURCE URL", session)
    kinds = get_type_hints(ProduceOptions)
    for name in options:
        if name not in kinds:
            raise TypeError(f"{name}: there is no such option{did_you_mean(name, kinds)}")
    values: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if (on_late := values.get("on_late", "block")) not in ("block", "fail"):
        raise ValueError(f"{named('on_late')}: {on_late!r} is neither block nor fail")
    share, time_to_live = values.get("share", 1.0), seconds_of(values.get("time_to_live", 30.0), named("time_to_live"))
    if not isinstance(share, int | float) or isinstance(share, bool) or not share > 0 or time_to_live <= 0:
        raise ValueError(f"{named('share')} and {named('time_to_live')}: want numbers above 0")
    if warning := checked_duration("time_to_live", time_to_live, named("time_to_live")):
        log.warning("%s", warning)
    for name in ("linger_ms", "epoch"):
        number = values.get(name, 0)
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ValueError(f"{named(name)}: {number!r} is no whole number from 0")
    if values.get("linger_ms", 0) > LINGER_MS_MAX:
        raise ValueError(f"{named('linger_ms')}: {values['linger_ms']} ms is more than a day")
    if (epoch := values.get("epoch", 0)) >= EPOCHS:
        raise ValueError(f"{named('epoch')}: {epoch} does not fit into a mark; give a number below 2**64")
    settings = Settings(
        linger_seconds=values.get("linger_ms", 100) / 1000,
        share=share,
        time_to_live_seconds=time_to_live,
        on_late=on_late,
        epoch=values.get("epoch"),
    )
    clients = clients_of(
        address.region, endpoint, REQUESTS, cast("WireForm", wire), session=credentials, arn=address.arn
    )
    return Producer(clients, address.name, settings)
