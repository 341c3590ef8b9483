"""Reads the policies under docs/rights, and fills in their placeholders."""

import json
from pathlib import Path
from typing import Any

from standins.iam import ACCOUNT, REGION, Document

FOLDER = Path(__file__).parents[2] / "docs" / "rights"


def policy(name: str, *, without: str = "", **places: str) -> Document:
    """Return the policy in this file for these resources (STREAM, TABLE, CONSUMER), optionally without one action."""
    text = (FOLDER / f"aws-{name}.json").read_text()
    for placeholder, value in {"REGION": REGION, "ACCOUNT": ACCOUNT, **places}.items():
        text = text.replace(placeholder, value)
    document: dict[str, Any] = json.loads(text)
    assert not without or without in actions(name)
    for statement in document["Statement"]:
        statement["Action"] = [action for action in _listed(statement["Action"]) if action != without]
    return document | {"Statement": [statement for statement in document["Statement"] if statement["Action"]]}


def actions(*names: str) -> list[str]:
    """Return all actions that these files allow."""
    files = [json.loads((FOLDER / f"aws-{name}.json").read_text()) for name in names]
    return [action for file in files for statement in file["Statement"] for action in _listed(statement["Action"])]


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
