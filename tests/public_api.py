"""Lists the public names with their signatures. As a command, writes the list to specs/public-api/ (`make api`)."""

import enum
import inspect
import re
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "specs" / "public-api"
NOW = FOLDER / "now.txt"
BEFORE = FOLDER / "before.txt"
"""The list of the last release. Before the first release, this file does not exist."""
STARS: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
PUBLIC = {
    "leasehold": {
        "a consumer or a producer is one call": "arun produce read run worker",
        "a handler gets them": "Delivery Record",
        "a program catches them; each is raised for another remedy": """
        DeadLetterError LeaseholdError NotWritten OutcomeUnknown ProducerError RecordFailed RecordLate SourceError
        SourceUnavailable StoreError Trimmed WorkerError
        """,
        "the seam: a consumer of one's own calls them": "look_again plan problems renewals Watch",
        "the seam takes or returns them": "Config Lease Look Me Position Problem Shard",
        "what `plan` can answer": "Action Claim Create Delete Release Renew RequestHandoff Steal",
        "the rule sets": "EventHubs Kcl KclRust Minimal",
        "where a lease starts or ends": "LATEST SHARD_END TRIM_HORIZON at_timestamp",
    },
    "leasehold.planner": {
        "a reader of shards asks them what to read and what to create": "children_to_create readable",
        "a log tells whose renewals are slow": "slow_owners",
        "a rule set of one's own derives from it": "RuleSet",
        "fields of `Me`, `Lease` and `Shard` have these types": "HASH_KEYS HashRange History Hole Annotations Version",
    },
    "leasehold.stores": {
        "a table is opened by its URL": "open_both open_store",
        "an action becomes a write": "execute",
        "a store of one's own implements it": "Capabilities Listing Store",
        "a write has one of these outcomes": "Done Lost Outcome OutcomeUnknown StoreError",
        "a write is one of these": """
        AnnotateLease CheckpointLate CheckpointLease ClaimLease CreateLease DeleteLease GiveLease ReleaseLease
        RenewLease RequestLease StealLease TakeBackLease WithdrawRequest Write
        """,
    },
    "leasehold.adapters": {
        "a handler with a policy of its own": "Delivery Handling by_key",
        "a consumer that acknowledges later": "Assignment ShardConsumer",
        "a worker beside a loop of one's own": "Runner Worker",
        "what `leasehold.run` opens by a URL": "dead_letters open_source",
    },
    "leasehold.spark": {
        "a session can load and write leased streams": "register",
        "a query goes on after temporary failures": "supervise",
    },
}
"""All names that users import, by the module's address and by the reason why they are public."""
_MODULES = re.compile(r"\b(?:leasehold|collections|typing|attr|enum|threading)(?:\.\w+)*\.(?=\w)")


def public_api() -> str:
    """Return the list as text, with a line for each name and for each public member of a class."""
    lines = [f"version {'.'.join(version('leasehold').split('.')[:2])}"]
    for address, reasons in PUBLIC.items():
        module = import_module(address)
        lines += ["", address]
        for reason, names in reasons.items():
            lines.append(f"  # {reason}")
            for name in sorted(names.split(), key=str.lower):
                lines += _described(name, getattr(module, name))
    return "\n".join(lines) + "\n"


def _described(name: str, value: object) -> list[str]:
    if inspect.isclass(value):
        return [f"  class {name}{_signature(value)}", *_members(value)]
    if inspect.isfunction(value):
        return [f"  def {name}{_signature(value)}"]
    return [f"  {name}: {_plain(str(value)) if not hasattr(value, '__attrs_attrs__') else _plain(repr(value))}"]


def _members(kind: type) -> list[str]:
    """Return the public methods and properties of this class. Its fields are in its signature."""
    members = []
    for name in sorted(vars(kind)):
        value = inspect.getattr_static(kind, name)
        if name.startswith("_") or inspect.ismemberdescriptor(value):
            continue
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if inspect.isfunction(value):
            members.append(f"    def {name}{_signature(value)}")
        elif isinstance(value, enum.Enum):
            members.append(f"    {name} = {value.value!r}")
        else:
            members.append(f"    {name}")
    return members


def _signature(value: object) -> str:
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]  # a class or a function
    except ValueError:
        return "(...)"
    parameter_texts: list[str] = []
    for parameter in signature.parameters.values():
        kind = "" if parameter.annotation is inspect.Parameter.empty else f": {_type(parameter.annotation)}"
        default = "" if parameter.default is inspect.Parameter.empty else f" = {_default(parameter.default)}"
        star = STARS.get(parameter.kind, "")
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not any(word[0] == "*" for word in parameter_texts):
            parameter_texts.append("*")
        parameter_texts.append(f"{star}{parameter.name}{kind}{default}")
    returned_type = signature.return_annotation
    return_suffix = (
        "" if inspect.isclass(value) or returned_type is inspect.Signature.empty else f" -> {_type(returned_type)}"
    )
    return f"({', '.join(parameter_texts)}){return_suffix}"


def _type(annotation: object) -> str:
    return _plain(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


def _default(value: object) -> str:
    return value.__name__ if inspect.isroutine(value) or inspect.isclass(value) else _plain(repr(value))


def _plain(text: str) -> str:
    """Remove the names of the modules in which types are defined, because these are not public."""
    return _MODULES.sub("", text)


def main() -> None:
    NOW.write_text(public_api())


if __name__ == "__main__":
    main()
