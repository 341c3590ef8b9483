"""Adds options to a command from one of the tables in `leasehold.adapters.options`."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from leasehold.adapters.cli.common.times import seconds
from leasehold.adapters.inputs import dashed
from leasehold.adapters.options import Option, options_of

Function = TypeVar("Function", bound=Callable[..., None])


def table_options(*names: str) -> Callable[[Function], Function]:
    """Replace `**options: Unpack[TABLE]` of a command by one parameter per option, which Typer understands.

    The new parameters come before the command's keyword-only parameters. The command receives their values in
    `options`, by name.

    Args:
        names: The options to add. If there are none, add all options that are meant for commands.
    """

    def decorated(command: Function) -> Function:
        parameters = [*inspect.signature(command).parameters.values()]
        rest = next(each for each in parameters if each.kind is each.VAR_KEYWORD)
        table = get_args(get_type_hints(command)[rest.name])[0]
        made = [
            _parameter(option)
            for name, option in options_of(table).items()
            if (name in names if names else option.in_command)
        ]
        own = [each for each in parameters if each is not rest]
        before = [each for each in own if each.kind is not each.KEYWORD_ONLY]
        after = [each for each in own if each.kind is each.KEYWORD_ONLY]
        listed = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*before, *made, *after)]
        command.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]  # Typer reads both
        command.__annotations__ = {each.name: each.annotation for each in listed} | {"return": None}
        return command

    return decorated


def _parameter(option: Option) -> inspect.Parameter:
    kind: Any = str if str in option.types else option.types[0]
    more: dict[str, Any] = {}
    if option.limits is not None:
        kind, more = float, {"parser": seconds(), "metavar": "DURATION"}
    elif option.choices:
        kind, more = str, {"metavar": "NAME"}  # the help has the names, and the table checks them
    elif option.name == "set":
        kind = list[str]
    text = option.help + (f" [{option.unset}]" if option.unset else "")
    flags = option.flags or ((dashed(option.name),) if kind is not bool else ())
    annotation = Annotated[kind | None, typer.Option(*flags, help=text, **more)]
    default = option.default
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
