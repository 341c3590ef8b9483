"""The configuration of a fleet, as options of a command say it."""

import json
from typing import Any

from leasehold.adapters.json_form.fields import JsonValue
from leasehold.adapters.json_form.question import config_of
from leasehold.adapters.sources.event_hubs.pace import paced
from leasehold.balancer.config import Config


def settings(given: dict[str, Any], more: list[str]) -> dict[str, Any]:
    """The named settings that are not None, and those given as name=value. Raises ValueError for another form."""
    fields = {name: value for name, value in given.items() if value is not None}
    for setting in more:
        name, separator, text = setting.partition("=")
        if not separator:
            raise ValueError(f"--set: {setting!r} is not of the form name=value")
        fields[name] = _value(text)
    return fields


def configuration(found: dict[str, Any]) -> Config:
    """The configuration of these settings. Raises ValueError naming one that cannot be."""
    return config_of(JsonValue("input", found))


def configuration_for(source: str, found: dict[str, Any]) -> Config:
    """The same for this stream: of a hub, with the seconds that suit a group of official workers where none are set."""
    config = configuration(found)
    return paced(config, found) if source.startswith("eventhubs:") else config


def _value(text: str) -> Any:  # noqa: ANN401  the field that it is for says what it must be
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
