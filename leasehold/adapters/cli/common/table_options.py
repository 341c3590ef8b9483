"""Adds options to a command from one of the tables in `leasehold.adapters.options`."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from leasehold.adapters.cli.common.times import make_seconds_parser
from leasehold.adapters.inputs import flag_name
from leasehold.adapters.options import Option, options_by_name

Function = TypeVar("Function", bound=Callable[..., None])


def add_table_options(*names: str) -> Callable[[Function], Function]:
    """Replace the parameter `**options: Unpack[TABLE]` of a command by one parameter per option, as Typer requires.

    The new parameters come before the command's keyword-only parameters. The command receives their values in
    `options`, by name.

    Args:
        names: The options to add. If no name is given, all options that are meant for commands are added.
    """

    def decorate(command: Function) -> Function:
        parameters = [*inspect.signature(command).parameters.values()]
        options_parameter = next(parameter for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD)
        options_type = get_args(get_type_hints(command)[options_parameter.name])[0]
        option_parameters = [
            _make_parameter(option)
            for name, option in options_by_name(options_type).items()
            if (name in names if names else option.in_command)
        ]
        other_parameters = [parameter for parameter in parameters if parameter is not options_parameter]
        positional_parameters = [
            parameter for parameter in other_parameters if parameter.kind is not parameter.KEYWORD_ONLY
        ]
        keyword_parameters = [parameter for parameter in other_parameters if parameter.kind is parameter.KEYWORD_ONLY]
        new_parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in (*positional_parameters, *option_parameters, *keyword_parameters)
        ]
        command.__signature__ = inspect.Signature(new_parameters)  # type: ignore[attr-defined]  # Typer reads both
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in new_parameters} | {
            "return": None
        }
        return command

    return decorate


def _make_parameter(option: Option) -> inspect.Parameter:
    option_type: Any = str if str in option.types else option.types[0]
    typer_arguments: dict[str, Any] = {}
    if option.limits is not None:
        option_type, typer_arguments = float, {"parser": make_seconds_parser(), "metavar": "DURATION"}
    elif option.choices:
        option_type, typer_arguments = str, {"metavar": "NAME"}  # the help lists the choices
    elif option.name == "set":
        option_type = list[str]
    help_text = option.help + (f" [{option.unset}]" if option.unset else "")
    flags = option.flags or ((flag_name(option.name),) if option_type is not bool else ())
    annotation = Annotated[option_type | None, typer.Option(*flags, help=help_text, **typer_arguments)]
    default_value = option.default
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default_value, annotation=annotation)
