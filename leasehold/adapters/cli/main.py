"""Defines the command line. Only the module of the called command is imported."""

import logging
import re
from functools import wraps
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from leasehold.adapters.cli import EXTRAS, explain_missing_import
from leasehold.adapters.cli.common.help_layout import stack_option_names
from leasehold.adapters.cli.common.placeholders import install_placeholders
from leasehold.plugins import plugins
from leasehold.stores.printable import did_you_mean

COMMANDS = {
    "consume": ("consume", "Join a group of workers and process this worker's shards."),
    "copy-leases": ("copy_leases", "Copy checkpoints from one store to another."),
    "deaggregate": ("deaggregate", "Extract the user records of Kinesis records, as the KCL does."),
    "doctor": ("steer.doctor", "Check rights, conditional writes and clocks, and estimate costs."),
    "explain": ("steer.explain", "Explain what each worker would do now, and why a lease has its owner."),
    "leases": ("leases", "Show the leases with their owners, status and lag."),
    "multilang": ("steer.multilang", "Run KCL record processors in any language, without Java."),
    "pipeline": ("pipeline", "Write a stream to Parquet files, with Spark."),
    "plan": ("plan", "Plan the actions of one worker from a listing, as JSON."),
    "produce": ("produce", "Write lines to a stream, aggregated, each key in order."),
    "replay": ("replay", "Process dead letters again; those that fail again stay."),
    "reset": ("reset", "Set checkpoints back or forward."),
    "serve": ("steer.serve", "Serve a live, read-only web page of lease tables."),
    "swap": ("steer.swap", "Move the lease table of a running fleet to another store or layout."),
}
"""Our commands by name. Each has the module in this folder that contains its `app`, and a line for the help."""

LAB_COMMANDS = {
    "demo": "Watch a fleet on this machine lose a worker and nothing else.",
    "dev": "Run stand-ins for Kinesis or Event Hubs and their lease tables here, until Ctrl-C.",
    "simulate": "Simulate how fast a fleet is balanced, and at what cost.",
    "what-if": "Simulate which leases move if workers join or leave.",
}
"""The commands that `leasehold[dev]` installs, with their lines in the help.

The help shows these commands even if they are not installed.
"""

COMMANDS_BY_HEADING = {
    "Begin with these": ("dev", "consume", "leases"),
    "Run": ("multilang", "produce", "replay", "pipeline"),
    "Look": ("serve", "explain", "doctor"),
    "Steer": ("reset", "copy-leases", "swap"),
    "Prove and try out": ("demo", "what-if", "simulate", "plan", "deaggregate"),
}
"""The headings in the help, with the commands under each heading, in order."""

HELP_FLAGS = frozenset({"-h", "--help"})

UsageError: type[Any] = typer.BadParameter.__mro__[1]
"""Click's `UsageError`. Typer may use a copy of Click, so the class is taken from Typer."""

_INVALID_CHOICE_MESSAGE = re.compile(r"'(?P<word>[^']*)' is not one of (?P<choices>.*?)\.?")


class LazyCommands(TyperGroup):
    """A group that imports a command only when the command is called or completed.

    Therefore no command needs the libraries of another command.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401  Click's own type, which Typer provides
        """Return the command itself, not the placeholder that stands for it in the help."""
        name, matched_name, remaining_args = super().resolve_command(ctx, args)
        if name is None:
            return (None, matched_name, remaining_args)
        with explain_missing_import(f"leasehold {name}"):
            return (
                name,
                get_command(_import_app(name, help_requested=bool(HELP_FLAGS.intersection(remaining_args)))),
                remaining_args,
            )

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  Click's own type, which Typer provides
        """Run the command, rewriting Click's usage errors in our style."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            error.message = error.message.replace("Value error, ", "")  # a prefix of the library that validates
            if similar_options := getattr(error, "possibilities", None):
                error.message += did_you_mean(error.option_name, similar_options)
                error.possibilities = None
            elif message_match := _INVALID_CHOICE_MESSAGE.fullmatch(error.message):
                error.message = message_match[0].rstrip(".") + did_you_mean(
                    message_match["word"], re.findall("'([^']*)'", message_match["choices"])
                )
            raise

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401  Click's own type, which Typer provides
        """Return the names of the commands in the order of the help."""
        command_order = [name for names in COMMANDS_BY_HEADING.values() for name in names]
        return sorted(
            super().list_commands(ctx),
            key=lambda name: command_order.index(name) if name in command_order else len(command_order),
        )


def _load_app(name: str) -> typer.Typer:
    if name in COMMANDS:
        return import_module(f"leasehold.adapters.cli.{COMMANDS[name][0]}").app  # type: ignore[no-any-return]
    if name not in plugins("commands"):
        raise ModuleNotFoundError(name="leasehold_lab")
    return plugins("commands")[name].load()  # type: ignore[no-any-return]  # its group contains Typer apps


def _make_placeholder_command() -> None:
    """Stand for a command in the help."""


def _import_app(name: str, *, help_requested: bool) -> typer.Typer:
    """Import a command. If only its help is requested, libraries that are missing are replaced by placeholders."""
    try:
        loaded_app = _load_app(name)
    except ModuleNotFoundError as error:
        if not help_requested:
            raise
        import_error = error
        if error.name == "leasehold_lab":
            loaded_app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
            loaded_app.command(
                help=f"{LAB_COMMANDS[name]} Its options are shown once it is installed: pip install 'leasehold[dev]'"
            )(_make_placeholder_command)
        else:
            with install_placeholders(EXTRAS):
                loaded_app = _load_app(name)

        def command(*_values: object, **_named: object) -> None:
            """Report the missing library, because the command itself was called and not only its help."""
            with explain_missing_import(f"leasehold {name}"):
                raise import_error

        for registered_command in loaded_app.registered_commands:
            assert registered_command.callback is not None  # noqa: S101  Typer's commands have one
            registered_command.callback = wraps(registered_command.callback)(command)
    return loaded_app


stack_option_names()
app = typer.Typer(cls=LazyCommands, no_args_is_help=True, context_settings={"help_option_names": sorted(HELP_FLAGS)})


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"leasehold {version('leasehold')}")
        raise typer.Exit


@app.callback()
def leasehold(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Share the shards of a stream among a fleet of workers that coordinate only through a lease table."""
    # Azure's and AWS's libraries log a page of text for each token that they cannot get. The command prints one line
    # instead.
    for library in ("azure.identity", "botocore.credentials", "botocore.tokens"):
        logging.getLogger(library).setLevel(logging.CRITICAL)


_HEADINGS = {name: heading for heading, names in COMMANDS_BY_HEADING.items() for name in names}
_HELP_LINES = {
    **{name: f"A command of {each.dist and each.dist.name}." for name, each in plugins("commands").items()},
    **LAB_COMMANDS,
    **{name: line for name, (_, line) in COMMANDS.items()},
}
for _name, _text in _HELP_LINES.items():
    app.command(_name, help=_text, rich_help_panel=_HEADINGS.get(_name))(_make_placeholder_command)


def run() -> None:
    """Run the command line."""
    app(prog_name="leasehold")


if __name__ == "__main__":
    run()
