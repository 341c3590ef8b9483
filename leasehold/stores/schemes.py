"""Addresses of stores and sources, `scheme://place?option=value`, and the modules that open them."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from attrs import frozen


@frozen
class Scheme:
    """The meaning of a scheme: the module that has `open_url`, the options that it understands, and its libraries.

    extra  the extra of leasehold that brings these libraries; "" where it needs none
    """

    module: str
    options: frozenset[str] = frozenset()
    extra: str = ""

    def load(self, kind: str, fault: type[Exception]) -> Any:  # noqa: ANN401  each kind types its own modules
        """The module. Raises `fault` with what to install where a library is missing."""
        try:
            return import_module(self.module)
        except ModuleNotFoundError as missing:
            if not self.extra:
                raise
            raise fault(f"this {kind} needs {missing.name}; install leasehold[{self.extra}]") from missing


def read_url(url: str, kind: str, schemes: Mapping[str, Scheme]) -> tuple[str, str, Mapping[str, str]]:
    """The scheme, the place and the options of the URL of a store or source (its `kind`).

    Raises ValueError, naming what is wrong and never repeating the URL (it may hold a secret).
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(f"{kind} URL: it cannot be read as a URL; write scheme://place") from None
    if parts.scheme not in schemes:
        raise ValueError(f"{kind} URL: unknown scheme {parts.scheme!r}; choose one of {', '.join(sorted(schemes))}")
    # The secrets of AWS have slashes, and what stands before the first would pass for a place with a port.
    slashed = ":" in parts.netloc and "@" in parts.path
    if parts.username or parts.password or slashed:
        raise ValueError(f"{kind} URL: credentials do not belong in it; use the environment")
    known = schemes[parts.scheme].options
    options: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known:
            choice = f"choose among {', '.join(sorted(known))}" if known else f"this {kind} has none"
            raise ValueError(f"{kind} URL: unknown option {name!r}; {choice}")
        if not value or name in options:
            hint = "in a shell, $Default and the like want single quotes around the URL"
            raise ValueError(f"{kind} URL: option {name!r} wants one value; {hint}")
        options[name] = value
    return parts.scheme, unquote(parts.netloc + parts.path), options
