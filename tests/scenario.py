"""Runs the scenario files in specs/scenarios: they contain commands, and the decisions of the rules.

A file is a list of blocks with blank lines between them. A block has a sentence about its purpose (#), commands, a line
of dashes, and the result. A block without dashes is the file's preamble, whose commands are run before those of every
other block. Apart from that, blocks are independent.

    config rules=kcl max_steals=2      options as in `leasehold plan`
    layout aab.x- idle=2               one lease per letter, which is its owner (. never owned, x expired, - released)
    held a=3 b=3 free=1 expired=2      this many leases each; a*100=5 stands for a-00=5, a-01=5, ...
    lease s-1 owner=a idle=31          one lease, its fields as in `leasehold plan`
    shards 4+ 6<0,1 8<6,7+@0-399       listed shards: + open, < parents, @ hash range (or @0-max)
    leased 3 4 checkpoint=LATEST       leases for these listed shards, owned by `other`
    scan at=0                          a listing of the table at this second
    reports j=1 k=7                    the latest reports of a KCL 3.x leader, named first, and its workers
    ranges 0-1 2-max                   leases r-0, r-1, ... that cover these hash keys
    renew s-1                          the version of this lease changes
    annul s-1, annul-shards 3 4        deletes rows; removes shards from the listing
    plan me turn=2                     the actions of `me`, and the counts of leases before and after them
    dialects me                        the actions of `me` in each dialect of the event-hubs rules
    settle a b*3 rounds=9              these workers plan and act in turns until only renewals are left
    problems, holes                    the problems of a listing; the hash keys that no lease covers
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from attrs import define, evolve, field

from leasehold.adapters.json_form import parse_plan_request
from leasehold.balancer.actions import Action, Claim, Create, Delete, Release, RequestHandoff, Steal, Taking
from leasehold.balancer.config import Config
from leasehold.balancer.family import problems
from leasehold.balancer.model import HASH_KEYS, HashRange, Lease, Me, Shard, Version
from leasehold.balancer.plan import plan
from leasehold.balancer.watch import Reports, Watch


@define
class Scene:
    """The state that the commands of a block have set up so far."""

    config: Config = field(factory=Config)
    leases: dict[str, Lease] = field(factory=dict)
    shards: list[Shard] = field(factory=list)
    watch: Watch = field(factory=Watch)
    reports: Reports = field(factory=Reports)

    def run(self, line: str) -> str:
        """Run one command, and return its result, which is empty if the command only changes the state."""
        name, *words = line.split()
        plain = [word for word in words if "=" not in word]
        options = {key: _parse_value(value) for key, _, value in (word.partition("=") for word in words if "=" in word)}
        commands: dict[str, Callable[[list[str], dict[str, Any]], str | None]] = {
            "config": self._config,
            "layout": self._layout,
            "held": self._held,
            "lease": self._lease,
            "shards": self._shards,
            "leased": self._leased,
            "scan": self._scan,
            "reports": self._reports,
            "renew": self._renew,
            "annul": self._annul,
            "annul-shards": self._annul_shards,
            "ranges": self._ranges,
            "plan": self._plan,
            "dialects": self._dialects,
            "settle": self._settle,
            "problems": self._problems,
            "holes": self._holes,
        }
        return commands[name](plain, options) or ""

    def _config(self, _plain: list[str], options: dict[str, Any]) -> None:
        self.config = parse_plan_request(_build_request([], options)).config

    def _layout(self, plain: list[str], options: dict[str, Any]) -> None:
        states: dict[str, dict[str, Any]] = {
            ".": {"idle": None},
            "-": {"idle": 1},
            "x": {"owner": "gone", "idle": 1000},
        }
        for index, letter in enumerate(plain[0] if plain else ""):
            self._add(str(index), states.get(letter, {"owner": letter} | options))

    def _held(self, _plain: list[str], options: dict[str, Any]) -> None:
        states: dict[str, dict[str, Any]] = {"free": {"idle": None}, "expired": {"owner": "gone", "idle": 1000}}
        for name, count in options.items():
            for owner in _expand_names([name]):
                for _ in range(count):
                    self._add(f"{len(self.leases):03d}", states.get(owner, {"owner": owner}))

    def _lease(self, plain: list[str], options: dict[str, Any]) -> None:
        parents = {"parents": str(options["parents"]).split(",")} if "parents" in options else {}
        self._add(plain[0], options | parents)

    def _add(self, key: str, fields: dict[str, Any]) -> None:
        checkpoint = {"checkpoint": str(fields["checkpoint"])} if "checkpoint" in fields else {}
        (self.leases[key],) = parse_plan_request(
            _build_request([{"key": key, "version": "1"} | fields | checkpoint], {})
        ).leases

    def _shards(self, plain: list[str], _options: dict[str, Any]) -> None:
        self.shards += [_parse_shard(word) for word in plain]

    def _leased(self, plain: list[str], options: dict[str, Any]) -> None:
        shards_by_id = {shard.id: shard for shard in self.shards}
        for key in plain:
            self._add(key, {"owner": "other", "checkpoint": "LATEST"} | options)
            shard = shards_by_id.get(key, Shard(key))
            self.leases[key] = evolve(self.leases[key], parents=shard.parents, hash_range=shard.hash_range)

    def _scan(self, _plain: list[str], options: dict[str, Any]) -> None:
        listing = [evolve(lease, idle=0.0) for lease in self.leases.values()]
        self.watch, history = self.watch.look(listing, began=options["at"], ended=options["at"], reports=self.reports)
        self.leases = {lease.key: lease for lease in history}

    def _reports(self, _plain: list[str], options: dict[str, Any]) -> None:
        self.reports = Reports(next(iter(options)), tuple((worker, str(stamp)) for worker, stamp in options.items()))

    def _renew(self, plain: list[str], _options: dict[str, Any]) -> None:
        for key in plain:
            self.leases[key] = evolve(self.leases[key], version=Version(self.leases[key].version + "+"))

    def _annul(self, plain: list[str], _options: dict[str, Any]) -> None:
        for key in plain:
            del self.leases[key]

    def _annul_shards(self, plain: list[str], _options: dict[str, Any]) -> None:
        self.shards = [shard for shard in self.shards if shard.id not in plain]

    def _ranges(self, plain: list[str], _options: dict[str, Any]) -> None:
        for word in plain:
            key = f"r-{len(self.leases)}"
            self._add(key, {"owner": "other"})
            self.leases[key] = evolve(self.leases[key], hash_range=_parse_shard(f"{key}@{word}").hash_range)

    def _plan(self, plain: list[str], options: dict[str, Any]) -> str:
        me = Me(plain[0], options.get("turn", 0), self.watch.history)
        actions = plan(self.leases.values(), self.shards, me, self.config)
        return (
            "\n".join([*map(_with_alternates, actions), *self._describe_moved_counts(actions, me.worker)]) or "nothing"
        )

    def _describe_moved_counts(self, actions: Iterable[Action], me: str) -> list[str]:
        """Return the owners' counts of leases before and after these actions, which readers can check by hand.

        The keys of moved leases depend on a digest, which they cannot check.
        """
        leases_after = dict(self.leases)
        for action in actions:
            match action:
                case Claim() | Steal() | RequestHandoff():
                    leases_after[action.lease.key] = evolve(leases_after[action.lease.key], owner=me)
                case Release():
                    leases_after[action.lease.key] = evolve(leases_after[action.lease.key], owner=action.next_owner)
                case _:
                    pass
        counts_before, counts_after = _describe_counts(self.leases.values()), _describe_counts(leases_after.values())
        return [] if counts_before == counts_after else [f"held: {counts_before} -> {counts_after}"]

    def _dialects(self, plain: list[str], options: dict[str, Any]) -> str:
        results = []
        for name in ("gist", "dotnet", "java", "python", "python greedy"):
            dialect, _, mode = name.partition(" ")
            self._config(
                [], {"rules": "event-hubs", "dialect": dialect, "mode": mode or "balanced", "lease_seconds": 120}
            )
            results.append(f"{name}: " + ", ".join(self._plan(plain, options).splitlines()))
        return "\n".join(results)

    def _settle(self, plain: list[str], options: dict[str, Any]) -> str:
        action_counts: Counter[str] = Counter()
        for turn in range(options.get("rounds", 99)):
            count_before = action_counts.total()
            for worker in _expand_names(plain):
                actions = plan(self.leases.values(), None, Me(worker, turn), self.config)
                for action in actions:
                    if isinstance(action, Claim | Steal):
                        action_counts[type(action).__name__.lower()] += 1
                        self.leases[action.lease.key] = evolve(action.lease, owner=worker, idle=0.0)
            if action_counts.total() == count_before:
                break
        held_counts = _describe_counts(self.leases.values())
        return f"{held_counts}; {action_counts['claim']} claims, {action_counts['steal']} steals"

    def _problems(self, _plain: list[str], _options: dict[str, Any]) -> str:
        return "\n".join(f"{problem.shard} {problem.what}".strip() for problem in problems(self.shards)) or "nothing"

    def _holes(self, _plain: list[str], _options: dict[str, Any]) -> str:
        holes = self.watch.history.holes
        return "\n".join(f"{hole.first} to {hole.last}, reading {hole.times} in a row" for hole in holes) or "nothing"


def parse_blocks(text: str) -> Iterable[tuple[list[str], list[str], str]]:
    """Yield for each block the lines above its dashes, the preamble's commands, and the current result."""
    preamble: list[str] = []
    for block in re.split(r"\n{2,}", text.strip()):
        lines_above = block.partition("\n----")[0].splitlines()
        commands = [line for line in lines_above if not line.startswith("#")]
        if "\n----" not in block:
            preamble = commands
            continue
        scene = Scene()
        results = [scene.run(line) for line in preamble + commands]
        yield lines_above, preamble, "\n".join(result for result in results if result)


def rewritten(text: str) -> str:
    """Return the text of the file with the results under the current rules."""
    result_blocks = parse_blocks(text)
    rewritten_blocks = []
    for block in re.split(r"\n{2,}", text.strip()):
        if "\n----" in block:
            lines_above, _, result = next(iter(result_blocks))
            rewritten_blocks.append("\n".join([*lines_above, "----", result]))
        else:
            rewritten_blocks.append(block)
    return "\n\n".join(rewritten_blocks) + "\n"


def _with_alternates(action: Action) -> str:
    text = _format_action(action)
    if isinstance(action, Taking):
        text = " or ".join([text, *(_format_action(alternate) for alternate in action.alternates)])
    return f"{text} ({action.rule})"


def _format_action(action: Action) -> str:
    lease = action.lease
    verb = re.sub(r"(?<!^)(?=[A-Z])", " ", type(action).__name__).lower()
    match action:
        case Create():
            return f"{verb} {lease.key} at {lease.checkpoint.sequence}"
        case Claim():
            return f"{verb} {lease.key}, {'free' if lease.owner is None else 'expired'}"
        case Steal() | RequestHandoff():
            return f"{verb} {lease.key} from {action.from_owner}"
        case Release():
            return f"{verb} {lease.key} to {action.next_owner or 'all'}"
        case Delete():
            return f"{verb} {lease.key}, {'finished' if lease.ended else 'unlisted'}"
        case _:
            return f"{verb} {lease.key}"


def _describe_counts(leases: Iterable[Lease]) -> str:
    """Describe how many workers with the same name (up to its last dash) have the same number of leases."""
    lease_counts = Counter(lease.owner or "nobody" for lease in leases)
    worker_counts = Counter((owner.rpartition("-")[0] or owner, count) for owner, count in lease_counts.items())
    return ", ".join(
        f"{name} {count}" if workers == 1 else f"{workers} of {name} {count}"
        for (name, count), workers in sorted(worker_counts.items(), key=lambda entry: (entry[0][0], -entry[0][1]))
    )


def _parse_shard(word: str) -> Shard:
    word, _, keys = word.partition("@")
    name, _, parents = word.rstrip("+").partition("<")
    hash_range: HashRange | None = None
    if keys:
        first_key, _, last_key = keys.partition("-")
        hash_range = (int(first_key), HASH_KEYS[1] if last_key == "max" else int(last_key))
    return Shard(name, parents=tuple(parents.split(",")) if parents else (), hash_range=hash_range, open="+" in word)


def _expand_names(words: Iterable[str]) -> list[str]:
    """Expand names: a*3 stands for a-00, a-01 and a-02."""
    names = []
    for word in words:
        name, star, count = word.partition("*")
        names += [f"{name}-{index:02d}" for index in range(int(count))] if star else [name]
    return names


def _parse_value(text: str) -> Any:  # noqa: ANN401  whatever JSON can say
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _build_request(leases: list[dict[str, Any]], config: dict[str, Any]) -> bytes:
    return json.dumps({"leases": leases, "me": {"worker": "me"}, "config": config}).encode()
