"""For tests of one's own: strategies, the laws of the seam, the contract of stores, fleets under virtual time.

It wants `leasehold[testing]`. A name is loaded when it is first asked for: the contract needs no Hypothesis, the laws
no simulator.
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
