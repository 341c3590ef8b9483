"""Provides tools for your tests: Hypothesis strategies, laws of the planner, the store contract, and simulated fleets.

Install the tools with `leasehold[testing]`. Each name is imported on first use, so the store contract does not need
Hypothesis and the laws do not load the simulator.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leasehold_lab.properties import laws
    from leasehold_lab.properties.contracts import leasehold_store_contract
    from leasehold_lab.properties.simulation import (
        LawBroken,
        SimulationFailed,
        chaos,
        least_moves,
        settled,
        simulate,
    )
    from leasehold_lab.properties.strategies import (
        Scene,
        SmallFleet,
        configs,
        fleets,
        histories,
        leases,
        listings,
        rule_sets,
        scenes,
        workers,
    )

__all__ = [
    "LawBroken",
    "Scene",
    "SimulationFailed",
    "SmallFleet",
    "chaos",
    "configs",
    "fleets",
    "histories",
    "laws",
    "leasehold_store_contract",
    "leases",
    "least_moves",
    "listings",
    "rule_sets",
    "scenes",
    "settled",
    "simulate",
    "workers",
]

_PACKAGE = "leasehold_lab.properties"
_HOMES = {
    "leasehold_store_contract": "contracts",
    **dict.fromkeys(("LawBroken", "SimulationFailed", "chaos", "least_moves", "settled", "simulate"), "simulation"),
    **dict.fromkeys(
        (
            "Scene",
            "SmallFleet",
            "configs",
            "fleets",
            "histories",
            "leases",
            "listings",
            "rule_sets",
            "scenes",
            "workers",
        ),
        "strategies",
    ),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name == "laws":
            return import_module(f"{_PACKAGE}.laws")
        return getattr(import_module(f"{_PACKAGE}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] == "leasehold":
            raise
        missing.add_note("leasehold.testing needs it: pip install 'leasehold[testing]'")
        raise
