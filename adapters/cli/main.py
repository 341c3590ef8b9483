"""The door of the command line: which command lives where; only the one that is called is imported."""

from collections.abc import Callable
from importlib import import_module

import typer

from adapters.cli import imported_for

COMMANDS = {
    "consume": ("adapters.cli.consume", "Join a fleet, and hand over the records of the shards it is given."),
    "copy-leases": ("adapters.cli.copy_leases", "Copy checkpoints from one store to another."),
    "deaggregate": ("adapters.cli.deaggregate", "Take Kinesis records apart into their user records, as KCL does."),
    "demo": ("adapters.cli.demo", "Watch a fleet on this machine lose a worker and nothing else."),
    "leases": ("adapters.cli.leases", "Show who holds what, and how far they are."),
    "pipeline": ("adapters.cli.pipeline", "Land a leased stream as Parquet with Spark, and add it up in windows."),
    "plan": ("adapters.cli.plan", "Answer one listing, as JSON, with the actions of one worker."),
    "produce": ("adapters.cli.produce", "Write lines to a stream, aggregated, each key in order."),
    "report": ("adapters.cli.report", "Show how leases are shared out, and how that changes, as a page."),
    "reset": ("adapters.cli.reset", "Set checkpoints back or forward."),
    "simulate": ("adapters.cli.simulate", "Simulate a fleet: how soon it is balanced, and at what cost."),
}
"""By name: the module whose `app` it is, and its line in the help. One line for each command."""

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def leasehold() -> None:
    """Share the shards of a stream among a fleet of workers, with nothing between them but a lease table."""


def _calling(name: str, module: str) -> Callable[[typer.Context], None]:
    """What imports a command when it is called, so that none waits for, or needs, another's libraries."""

    def call(ctx: typer.Context) -> None:
        with imported_for(f"leasehold {name}"):
            command: typer.Typer = import_module(module).app
        command(args=ctx.args, prog_name=f"leasehold {name}")

    return call


for _name, (_module, _help) in COMMANDS.items():
    # Everything after the name belongs to the command itself, --help included.
    app.command(
        _name,
        help=_help,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )(_calling(_name, _module))


def run() -> None:
    """The entry point."""
    app(prog_name="leasehold")


if __name__ == "__main__":
    run()
