"""What a simulated fleet is made of: values that say everything, so that equal scenarios run alike.

All times are seconds since the start of the run.
"""

import math
from typing import Literal

from attrs import evolve, field, frozen

from balancer.config import Config

Ending = Literal["crash", "leave"]
Reshaping = Literal["split", "merge", "double"]
Blow = Literal["lost", "unanswered", "crash before", "crash after", "restart"]


@frozen
class Nap:
    """A time in which a process stands still, as a paused virtual machine does."""

    at: float
    seconds: float


@frozen
class Member:
    """One process of the fleet.

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
    """

    worker: str
    config: Config
    starts: float = 0.0
    ends: float = math.inf
    ending: Ending = "crash"
    naps: tuple[Nap, ...] = ()
    phase: float = 0.0
    plans: float = math.inf
    foreign: bool = False
    rate: float = 1.0

    def alive(self, t: float) -> bool:
        """Whether it runs then."""
        return self.starts <= t < self.ends


@frozen
class Network:
    """What may befall a request, each with its probability.

    latency    least and most seconds to an answer
    stall      a delay of 1 to 3 s
    lost       the request never arrives
    unanswered it is carried out, and the answer lost
    late       the caller gives up after 1 s, and the write arrives within `late_seconds`
    twice      the client library repeats a write whose first answer was lost: the second answer comes back
    stale      a listing, or a reading that may be stale, shows some rows as they were up to a second ago
    outages    times in which nothing is answered (throttling included)
    plot       what befalls these writes, by their number in the whole run, for certain: those above, or their
               process dies before they are sent or as they are carried out, and perhaps comes again
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
    plot: tuple[tuple[int, Blow], ...] = ()


@frozen
class Reshape:
    """A change of the stream: the shards, by place among those open, that split or merge; "double" splits all."""

    at: float
    what: Reshaping
    place: int = 0


@frozen
class Scenario:
    """One run.

    seed      of everything that is left to chance
    owners    the owner of each lease at the start, None where it is free; its length is the number of shards
    members   every process, in the order in which they start at equal times
    seconds   how long it runs
    calm      from then on the network has no fault but latency, and nothing more happens to the fleet
    weights   the throughput of each lease in KB/s; empty: unknown
    reading   whether records are produced, read and checkpointed
    checkpoints
              least seconds between two checkpoints of a lease; 0: after every batch
    weighed   whether the throughput that readers measure is written down
    scan_per_cycle
              whether the table is scanned once per `cycle_seconds` and no more often, whatever the plan asks but C16
    dated     whether a listing tells how long ago each row was written, and bulletins are not free, as with blobs
    full      whether each renewal is recorded, which only a judge needs
    """

    seed: int
    owners: tuple[str | None, ...]
    members: tuple[Member, ...]
    seconds: float
    calm: float = 0.0
    network: Network = field(factory=Network)
    reshapes: tuple[Reshape, ...] = ()
    weights: tuple[float, ...] = ()
    reading: bool = False
    checkpoints: float = 0.0
    weighed: bool = False
    scan_per_cycle: bool = False
    dated: bool = False
    full: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the leases at the start."""
        width = len(str(max(len(self.owners) - 1, 0)))
        return tuple(f"s-{number:0{width}d}" for number in range(len(self.owners)))

    def with_seed(self, seed: int) -> "Scenario":
        """The same fleet under another chance."""
        return evolve(self, seed=seed)
