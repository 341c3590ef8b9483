"""Writes the generated parts of the reference: options, commands and URLs, from the code that reads them.

A page of docs/ has a comment such as `<!-- made: worker options -->` at the place of a part.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from inspect import getdoc
from typing import Any, Literal, get_args, get_origin

import attrs
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from typer.main import get_command

from leasehold.adapters.cli.main import COMMANDS_BY_HEADING, app
from leasehold.adapters.inputs import flag_name
from leasehold.adapters.json_form import RULES
from leasehold.adapters.ops.serving.app import METRIC_HELP
from leasehold.adapters.options import Options, ProduceOptions, options_by_name
from leasehold.adapters.sources import urls as sources
from leasehold.adapters.spark.event_hubs.options import EVENT_HUBS_SOURCE, HUB
from leasehold.adapters.spark.kinesis.options import KINESIS_SOURCE
from leasehold.adapters.spark.kinesis.sink import KINESIS_SINK
from leasehold.adapters.spark.kinesis.table_changes import DYNAMODB_SOURCE
from leasehold.adapters.spark.options import ALL_SOURCES, MIB, SparkOption
from leasehold.adapters.spark.sink import ALL_SINKS
from leasehold.balancer.config import Config
from leasehold.stores import urls as stores

MARK = re.compile(r"<!-- made: ([\w ]+) -->")
_ENTRY = re.compile(r"^(\w+)  +(\S.*)$")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put each generated part in its place."""
    del page, config, files
    return MARK.sub(lambda found: PARTS[found[1]](), markdown)


def described(kind: type) -> dict[str, str]:
    """Return what the aligned block of a class' docstring says of each field."""
    found, name = dict[str, str](), ""
    for line in (getdoc(kind) or "").splitlines():
        if entry := _ENTRY.match(line):
            name, found[entry[1]] = entry[1], entry[2]
        elif name and line.startswith("  "):
            found[name] += f" {line.strip()}"
        else:
            name = ""
    return found


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [[*head], ["---"] * len([*head]), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _type(hint: object) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(get_args(hint))
    if get_origin(hint) is Callable:
        return "function"
    name = hint.__name__ if isinstance(hint, type) else str(hint)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", name)


def _options(of: type) -> str:
    """Return the options of a table, and which of them a command has."""
    rows = list[tuple[str, ...]]()
    for name, option in options_by_name(of).items():
        default = option.unset or ("" if option.default is None else str(option.default))
        flags = (option.flags or (flag_name(name),)) if option.in_command else ("only in Python",)
        shown = ", ".join(f"`{flag}`" if flag.startswith("--") else flag for flag in flags)
        default = default.replace("_", "_<wbr>")  # otherwise the name of a variable widens its column
        rows.append((f"`{name}`", shown, ", ".join(map(_type, option.types)), default, option.help))
    return table(("option", "command line", "type", "default", "meaning"), rows)


def _spark_options(title: str, options: Iterable[SparkOption]) -> str:
    """Return the options of a Spark source or sink. The title is the head of the first column."""
    rows = list[tuple[str, ...]]()
    for option in options:
        if option.in_docs:
            values = option.values or ", ".join(f"`{choice}`" for choice in option.choices) or _limits(option)
            default = "required" if option.required else option.unset or _spark_default(option.default)
            more = f" ([more]({option.page}))" if option.page else ""
            rows.append((f"`{option.name}`", values, default, option.help + more))
    return table((title, "values", "default", "meaning"), rows)


def _limits(option: SparkOption) -> str:
    unlimited = SparkOption("", "")
    if option.maximum != unlimited.maximum:
        return f"{option.minimum} to {option.maximum}"
    return f"{_number(option.minimum)} or more" if option.minimum != unlimited.minimum else ""


def _spark_default(default: int | str | None) -> str:
    return _number(default) if isinstance(default, int) else f"`{default}`" if default else ""


def _number(number: int) -> str:
    return f"{number // MIB} MiB" if number and number % MIB == 0 else str(number)


def _planner() -> str:
    parts = list[str]()
    for title, kind in (("All rules", Config), *((f"`rules={name}`", kind) for name, kind in sorted(RULES.items()))):
        texts, rows = described(kind), list[tuple[str, ...]]()
        for each in attrs.fields(kind):
            if each.name != "rules":
                default = "" if isinstance(each.default, attrs.Factory) else str(each.default)  # type: ignore[arg-type]
                rows.append((f"`{each.name}`", default, texts.get(each.name, "")))
        if rows:
            parts.append(f"### {title}\n\n{table(('setting', 'default', 'meaning'), rows)}")
    return "\n\n".join(parts)


def _schemes(schemes: Mapping[str, stores.Scheme], place: str) -> str:
    rows = [
        (f"`{name}://{place}`", ", ".join(f"`{option}`" for option in sorted(scheme.options)) or "none")
        for name, scheme in schemes.items()
    ]
    return table(("URL", "options"), rows)


def _served_metrics() -> str:
    rows = [
        (f"`{name}`", "counter" if name.endswith("_total") else "gauge", text) for name, text in METRIC_HELP.items()
    ]
    return table(("name", "kind", "what it is"), rows)


def _commands() -> str:
    group: Any = get_command(app)
    parts = list[str]()
    for title, names in COMMANDS_BY_HEADING.items():
        parts.append(f"## {title}")
        for name in names:
            with group.make_context("leasehold", [name, "--help"]) as context:
                _, command, _ = group.resolve_command(context, [name, "--help"])
                parts.append(f"### leasehold {name}\n\n{_first(command.help)}\n\n{_parameters(command)}")
    return "\n\n".join(parts)


def _first(text: str | None) -> str:
    return (text or "").strip().partition("\n\n")[0].replace("\n", " ")


def _parameters(command: Any) -> str:  # noqa: ANN401  click's own, which typer brings
    rows = list[tuple[str, ...]]()
    for each in command.params:
        if getattr(each, "hidden", False):
            continue
        names = [*each.opts, *each.secondary_opts]
        argument = each.param_type_name == "argument"
        shown = f"`{names[0].upper()}`" if argument else ", ".join(f"`{name}`" for name in names)
        default = "required" if each.required else _default(each)
        rows.append((shown, default, (getattr(each, "help", "") or "").replace("<", "&lt;")))
    return table(("option", "default", "meaning"), rows)


def _default(parameter: Any) -> str:  # noqa: ANN401  likewise
    value = parameter.default
    if value is None or callable(value) or isinstance(value, bool) or value in ((), [], ""):
        return ""
    return str(getattr(value, "value", value))


PARTS: Mapping[str, Callable[[], str]] = {
    "worker options": lambda: _options(Options),
    "producer options": lambda: _options(ProduceOptions),
    "planner settings": _planner,
    "commands": _commands,
    "served metrics": _served_metrics,
    "options of all Spark sources": lambda: _spark_options("all sources", ALL_SOURCES),
    "options of the Kinesis source": lambda: _spark_options("`kinesis-leased`", KINESIS_SOURCE),
    "options of the DynamoDB source": lambda: _spark_options("`dynamodb-leased`", DYNAMODB_SOURCE),
    "options of the Event Hubs source": lambda: _spark_options("`eventhubs-leased`", EVENT_HUBS_SOURCE),
    "options of all Spark sinks": lambda: _spark_options("all sinks", ALL_SINKS),
    "options of the Kinesis sink": lambda: _spark_options("`kinesis-leased`", KINESIS_SINK),
    "options of the Event Hubs sink": lambda: _spark_options("`eventhubs-leased`", HUB),
    "source urls": lambda: _schemes(sources._SCHEMES, "…"),  # noqa: SLF001  the table that URLs are read by
    "store urls": lambda: _schemes(stores._SCHEMES, "…"),  # noqa: SLF001  likewise
}
