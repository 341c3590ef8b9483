"""From a URL to a source: `scheme://place?option=value`, each scheme importing only what it needs.

kinesis://stream?region=…&endpoint=…    Amazon Kinesis Data Streams, several as `a,b`;
                                        `if_trimmed=TRIM_HORIZON` goes on where a checkpoint was trimmed;
                                        `consumer=NAME` reads by enhanced fan-out
eventhubs://namespace/hub?group=…       Azure Event Hubs, as consumer group `$Default` if none is named
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from adapters.source import Source, SourceError


class _Module(Protocol):
    """What each of the modules below provides."""

    def open_url(self, place: str, options: Mapping[str, str]) -> Source:
        """The source at this place; raises ValueError naming an option it cannot use."""
        ...


# scheme: (module, options it understands, the extra that brings its libraries)
_SCHEMES: dict[str, tuple[str, frozenset[str], str]] = {
    "kinesis": ("adapters.kinesis.streams", frozenset({"region", "endpoint", "if_trimmed", "consumer"}), "aws"),
    "eventhubs": ("adapters.event_hubs.source", frozenset({"group", "transport", "prefetch"}), "azure"),
}


def open_source(url: str) -> Source:
    """The source this URL names; nothing is asked of the service yet.

    Raises ValueError, naming what is wrong and never repeating the URL (it may hold a secret), and
    SourceError if the source cannot be used as asked.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("source URL: it cannot be read as a URL; write scheme://place") from None
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"source URL: unknown scheme {parts.scheme!r}; choose one of {', '.join(sorted(_SCHEMES))}")
    if parts.username or parts.password:
        raise ValueError("source URL: credentials do not belong in it; use the environment")
    place = unquote(parts.netloc + parts.path)
    if not place:
        raise ValueError(f"source URL: it names no stream; write {parts.scheme}://NAME")
    module, known, extra = _SCHEMES[parts.scheme]
    return _load(module, extra).open_url(place, _options(parts.query, known))


def _options(query: str, known: frozenset[str]) -> Mapping[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            raise ValueError(f"source URL: unknown option {name!r}; choose among {', '.join(sorted(known))}")
        if not value or name in options:
            hint = "in a shell, $Default and the like want single quotes around the URL"
            raise ValueError(f"source URL: option {name!r} wants one value; {hint}")
        options[name] = value
    return options


def _load(module: str, extra: str) -> _Module:
    try:
        return cast("_Module", import_module(module))
    except ModuleNotFoundError as missing:
        raise SourceError(f"this source needs {missing.name}; install leasehold[{extra}]") from missing
