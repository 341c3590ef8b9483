"""The values that describe a simulated fleet completely, so that equal scenarios run alike.

All times are seconds since the start of the run.
"""

import math
from typing import Literal

from attrs import field, frozen

from leasehold.adapters.proving.simulator.misdeeds import Misdeed
from leasehold.adapters.proving.simulator.mishaps import Mishap
from leasehold.adapters.reading.handlers.handling import Handler
from leasehold.adapters.reading.runner import DRAIN_SECONDS
from leasehold.adapters.sources.call_patience import POLL_SECONDS
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Position

MemberEnding = Literal["crash", "leave"]
Reshaping = Literal["split", "merge", "double", "anew"]


@frozen
class Nap:
    """A time in which a process stands still, as a paused virtual machine does."""

    at: float
    seconds: float


@frozen
class Member:
    """A process of the fleet.

    worker  its id; a restarted process has the id of its predecessor
    config  its rules and cadence
    starts, ends, ending
            when it runs, and whether it dies without a word or drains
    naps    when it stands still
    phase   so long after its start it looks again, whatever it planned: fleets that begin together do not go on
            looking together
    plans   until when it plans; a zombie renews for longer than it plans
    foreign whether it stands for another library: it answers no requests for planned moves, and steals
            under the version as seen, as KCL 2.x and the Event Hubs SDKs do
    rate    how fast its clock runs
    drain_seconds
            most time for its drain
    """

    worker: str
    config: Config
    starts: float = 0.0
    ends: float = math.inf
    ending: MemberEnding = "crash"
    naps: tuple[Nap, ...] = ()
    phase: float = 0.0
    plans: float = math.inf
    foreign: bool = False
    rate: float = 1.0
    drain_seconds: float = DRAIN_SECONDS

    def alive(self, t: float) -> bool:
        """Whether it runs then."""
        return self.starts <= t < self.ends


@frozen
class Network:
    """The faults of requests, each with its probability.

    latency    least and most seconds to an answer
    stall      a delay of 1 to 3 s
    lost       the request never arrives
    unanswered it is carried out, and the answer lost
    late       the caller gives up after 1 s, and the write arrives within `late_seconds`
    twice      the client library repeats a write whose first answer was lost: the second answer comes back
    stale      a listing, or a reading that may be stale, shows some rows as they were up to a second ago
    outages    times in which nothing is answered (throttling included)
    reading    least and most seconds to an answer of the stream
    slow       times in which each reading of the stream is answered after 6 to 25 s
    patience   the time-outs of a reading, where there are such times
    """

    latency: tuple[float, float] = (0.005, 0.05)
    stall: float = 0.002
    lost: float = 0.0
    unanswered: float = 0.002
    late: float = 0.0
    late_seconds: float = 20.0
    twice: float = 0.0
    stale: float = 0.0
    outages: tuple[Nap, ...] = ()
    reading: tuple[float, float] = (0.0, 0.0)
    slow: tuple[Nap, ...] = ()
    patience: tuple[float, ...] = POLL_SECONDS


@frozen
class Reshape:
    """A change of the stream: the shards, by place among those open, that split or merge; "double" splits all.

    "anew" deletes the stream and makes it again, with the shards and ids of the start.
    """

    at: float
    what: Reshaping
    place: int = 0


@frozen
class Emptying:
    """Rows are deleted under the running fleet: by place among the keys then, or all, as in a table made anew."""

    at: float
    places: tuple[int, ...] = ()


@frozen
class Scenario:
    """A run to simulate.

    seed      of everything that is left to chance
    owners    the owner of each lease at the start, None where it is free; its length is the number of shards
    members   every process, in the order in which they start at equal times
    seconds   how long it runs
    calm      from then on the network has no fault but latency, and nothing more happens to the fleet
    weights   the throughput of each lease in bytes per second, None where unknown; empty: all unknown
    names     the keys of the leases; empty: s-0, s-1 and so on
    reading   whether records are produced, read and checkpointed
    checkpoints
              least seconds between two checkpoints of a lease; 0: after every batch
    read_seconds
              between two readings of a shard, and between two records of one
    weighed   whether the throughput that readers measure is written down
    scan_per_cycle
              whether the table is scanned once per `cycle_seconds` and no more often, whatever the plan asks but C16
    dated     whether a listing tells how long ago each row was written, and bulletins are not free, as with blobs
    full      whether each renewal and each reading is recorded, which only a judge needs
    misdeeds  what the callables of users do besides their work
    handler   is given every batch besides; what it raises or answers is judged as a handler's of a real worker is
    mishaps   what befalls single calls, where everything is recorded
    handling_seconds
              how long a handler takes
    bench_seconds
              how long a worker leaves a lease to others that it cannot read
    start     the checkpoint of the first rows
    emptyings when rows are deleted
    if_recreated
              what all workers are told to do with a stream that was made anew
    """

    seed: int
    owners: tuple[str | None, ...]
    members: tuple[Member, ...]
    seconds: float
    calm: float = 0.0
    network: Network = field(factory=Network)
    reshapes: tuple[Reshape, ...] = ()
    weights: tuple[int | None, ...] = ()
    names: tuple[str, ...] = ()
    reading: bool = False
    checkpoints: float = 0.0
    read_seconds: float = 1.0
    weighed: bool = False
    scan_per_cycle: bool = False
    dated: bool = False
    full: bool = False
    misdeeds: tuple[Misdeed, ...] = ()
    handler: Handler | None = None
    mishaps: tuple[Mishap, ...] = ()
    handling_seconds: float = 0.0
    bench_seconds: float = 60.0
    start: Position = TRIM_HORIZON
    emptyings: tuple[Emptying, ...] = ()
    if_recreated: Literal["TRIM_HORIZON", "LATEST"] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the leases at the start."""
        if self.names:
            return self.names
        width = len(str(max(len(self.owners) - 1, 0)))
        return tuple(f"s-{number:0{width}d}" for number in range(len(self.owners)))
