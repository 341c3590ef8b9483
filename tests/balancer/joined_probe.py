"""Adds the rule set `toy` to the list, and prints results of the planner, simulator, checker and commands."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from toy_rules import Toy

from leasehold.balancer import config

config.RULE_SETS += (Toy,)  # the only line that a new rule set needs; the code below is the same for all rule sets

from leasehold.adapters.cli.plan import EXAMPLE  # noqa: E402  imported after the line, as in a new process
from leasehold.adapters.json_form import plan_from_json  # noqa: E402
from leasehold_lab.checker.cases import build_quick_cases  # noqa: E402
from leasehold_lab.checker.verdict import judge_case  # noqa: E402
from leasehold_lab.simulator.chaos import PEERS  # noqa: E402
from leasehold_lab.simulator.question import SimulationQuestion  # noqa: E402
from leasehold_lab.simulator.question import simulate_question as simulated  # noqa: E402

QUESTION = {
    "leases": [{"key": f"s-{index}"} for index in range(4)],
    "me": {"worker": "a"},
    "config": {"rules": "toy", "most": 3},
}
outcome = simulated(SimulationQuestion(6, (2, 1), "toy", kind="scale-out", cycles=8.0))
verdicts = [judge_case(case) for case in build_quick_cases() if case.name == "two minimal, one toy"]
json.dump(
    {
        "plan": [action["rule"] for action in plan_from_json(json.dumps(QUESTION).encode())["actions"]],
        "help": "toy: most" in EXAMPLE,
        "spread": outcome.spread,
        "moves": outcome.moves,
        "checked": [[verdict.case, sorted(verdict.faults)] for verdict in verdicts],
        "chaos": Toy() in PEERS,
    },
    sys.stdout,
)
