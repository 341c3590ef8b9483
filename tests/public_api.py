"""Lists the public names with their signatures; as a command, writes them to specs/public-api/ (`make api`)."""

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
"""That of the last release; there is none before the first one, because no user can miss a name yet."""
STARS: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
ADDRESSES = ("leasehold", "leasehold.stores", "leasehold.adapters")
_MODULES = re.compile(r"\b(?:leasehold|collections|typing|attr|enum|threading)(?:\.\w+)*\.(?=\w)")


def public_api() -> str:
    """Return a line for each name, and one for each public member of a class."""
    lines = [f"version {'.'.join(version('leasehold').split('.')[:2])}"]
    for address in ADDRESSES:
        module = import_module(address)
        lines += ["", address]
        for name in sorted(module.__all__, key=str.lower):
            lines += _told(name, getattr(module, name))
    return "\n".join(lines) + "\n"


def _told(name: str, value: object) -> list[str]:
    if inspect.isclass(value):
        return [f"  class {name}{_signature(value)}", *_members(value)]
    if inspect.isfunction(value):
        return [f"  def {name}{_signature(value)}"]
    return [f"  {name}: {_plain(str(value)) if not hasattr(value, '__attrs_attrs__') else _plain(repr(value))}"]


def _members(kind: type) -> list[str]:
    """Return methods and properties that this class or a parent of ours has; fields are in its signature."""
    found = []
    for name in sorted(vars(kind)):
        value = inspect.getattr_static(kind, name)
        if name.startswith("_") or inspect.ismemberdescriptor(value):
            continue
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if inspect.isfunction(value):
            found.append(f"    def {name}{_signature(value)}")
        elif isinstance(value, enum.Enum):
            found.append(f"    {name} = {value.value!r}")
        else:
            found.append(f"    {name}")
    return found


def _signature(value: object) -> str:
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]  # a class or a function
    except ValueError:
        return "(...)"
    words: list[str] = []
    for each in signature.parameters.values():
        kind = "" if each.annotation is inspect.Parameter.empty else f": {_type(each.annotation)}"
        default = "" if each.default is inspect.Parameter.empty else f" = {_default(each.default)}"
        star = STARS.get(each.kind, "")
        if each.kind is inspect.Parameter.KEYWORD_ONLY and not any(word[0] == "*" for word in words):
            words.append("*")
        words.append(f"{star}{each.name}{kind}{default}")
    answer = signature.return_annotation
    ending = "" if inspect.isclass(value) or answer is inspect.Signature.empty else f" -> {_type(answer)}"
    return f"({', '.join(words)}){ending}"


def _type(annotation: object) -> str:
    return _plain(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


def _default(value: object) -> str:
    return value.__name__ if inspect.isroutine(value) or inspect.isclass(value) else _plain(repr(value))


def _plain(text: str) -> str:
    """Remove the names of the defining modules, which are not public."""
    return _MODULES.sub("", text)


def main() -> None:
    NOW.write_text(public_api())


if __name__ == "__main__":
    main()
