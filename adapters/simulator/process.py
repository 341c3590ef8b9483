"""One process of the fleet: a real worker, and the tasks that keep its appointments as `runner` does with threads."""

import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from attrs import evolve

from adapters.handling import Delivery, Handling
from adapters.holding import Holding
from adapters.holdings import WorkerError
from adapters.reading import Reading
from adapters.renewing import RETRY_SECONDS
from adapters.runner import RENEWERS, WRITERS
from adapters.simulator.client import Client
from adapters.simulator.paced import Paced
from adapters.simulator.scenario import Member
from adapters.simulator.tasks import Killed, Lock, Task
from adapters.simulator.told import Deed, Doing, Handed
from adapters.simulator.world import World
from adapters.worker import Unread, Worker
from balancer.cadence import start_seconds
from stores.protocol import StoreError

T = TypeVar("T")
R = TypeVar("R")

RESTART_SECONDS = 1.0
DRAIN_SECONDS = 30.0
ROUNDING_SECONDS = 1e-6
"""Between two clocks a due time is rounded; nobody may be called a moment too early, and so for ever."""


class Appointment:
    """When to call a piece of work again; it may be called sooner."""

    def __init__(self, work: Callable[[float], float]) -> None:
        self.work = work
        self.sooner = self.waiting = False
        self.task: Task | None = None
        self.successor: Callable[[float], float] | None = None


class Process:
    """A member while it runs. Everything in it stops with it.

    number  tells it from every other of its id
    """

    def __init__(self, member: Member, number: int, world: World) -> None:
        self.member, self.worker_id, self.process_id = member, member.worker, f"{member.worker}#{number}"
        self.foreign = member.foreign
        self._world, self._tasks, self._scenario = world, world.tasks, world.scenario
        self._draw = random.Random(f"{self._scenario.seed} {self.process_id}")  # noqa: S311  a seed is the point
        self._offset = self._draw.uniform(0.0, 1000.0)
        self._dead = self._draining = False
        self._asleep_until = 0.0
        self._readings: dict[str, Appointment] = {}
        self._renewals: deque[Callable[[], object]] = deque()
        self._renewers = 0
        kind = Paced if self._scenario.scan_per_cycle else Worker
        self.worker = kind(
            store=Client(world, self, self._draw),
            source=world.source,
            me=member.worker,
            config=member.config,
            consumer=self,
            each_renewal=self._begin,
            each_action=self._each,
            clock=self._clock,
            uniform=self._draw.uniform,
            process=self.process_id,
            hurried=lambda: self._call(self._turning),
            lock=lambda: Lock(world.tasks),
        )
        checkpoints = self._scenario.checkpoints
        self._handling = Handling(self._handle, most_wait_seconds=2.0, attempts=1000, checkpoint_seconds=checkpoints)
        self._turning, self._renewing = Appointment(self._turn), Appointment(self.worker.renew)

    def run(self) -> None:
        """Start working, and see to its naps and its end."""
        self._say("start")
        self._keep(self._turning, start_seconds(self.worker_id, self.member.config))  # C15
        self._keep(self._renewing)
        for nap in self.member.naps:
            if nap.at >= self._tasks.now:
                self._tasks.start(partial(self._fall_asleep, nap.seconds), nap.at)
        if self.member.phase:
            self._tasks.start(self.worker.hurry, self._tasks.now + self.member.phase)
        if self.member.plans < self.member.ends:
            self._tasks.start(lambda: self._say("zombie"), self.member.plans)
        if self.member.ends < math.inf:
            self._tasks.start(self._crash if self.member.ending == "crash" else self._leave, self.member.ends)

    def wait(self, seconds: float) -> None:
        """Let virtual time pass; raises Killed if the process died meanwhile."""
        self._tasks.sleep(seconds)
        self._stand_still()

    def die(self, *, again: bool) -> None:
        """Die without a word; perhaps be started again."""
        if again:
            self._restart()
        else:
            self._crash()

    def begin(self, holding: Holding) -> None:
        """Read what has become ours; during the drain, only to release it."""
        if self._draining:
            holding.ask_release()
        if self._scenario.reading:
            self._read(holding.key, Reading(self.worker, holding, self._handling).step)

    def part(self, holding: Holding) -> None:
        """Have its reading finish the running batch, then give it up."""
        if self._scenario.reading:
            self._call(self._readings.get(holding.key))
        else:
            Unread().part(holding)

    # Appointments

    def _read(self, key: str, step: Callable[[float], float]) -> None:
        before = self._readings.get(key)
        if before is None:
            self._readings[key] = Appointment(step)
            self._keep(self._readings[key], key=key)
        else:
            before.successor = step
            self._call(before)

    def _keep(self, appointment: Appointment, pause: float = 0.0, *, key: str | None = None) -> None:
        appointment.task = self._tasks.start(lambda: self._keeping(appointment, key), self._tasks.now + pause)

    def _keeping(self, appointment: Appointment, key: str | None) -> None:
        self._stand_still()
        while True:
            appointment.sooner = False
            due = self._ask(appointment.work)
            if due == math.inf and key is not None:
                self._over(key)
                return
            if not appointment.sooner:
                appointment.waiting = True
                self._tasks.sleep_until((due - self._offset) / self.member.rate + ROUNDING_SECONDS)
                appointment.waiting = False
            self._stand_still()

    def _over(self, key: str) -> None:
        over = self._readings.pop(key)
        if over.successor is not None:
            self._read(key, over.successor)

    def _call(self, appointment: Appointment | None) -> None:
        if appointment is None or appointment.task is None:
            return
        appointment.sooner = True
        if appointment.waiting:
            self._tasks.wake(appointment.task)

    def _ask(self, work: Callable[[float], float]) -> float:
        try:
            return work(self._clock())
        except WorkerError:
            self._restart()
            raise Killed from None
        except StoreError:
            return self._clock() + RETRY_SECONDS

    def _turn(self, now: float) -> float:
        stopped = self._tasks.now >= self.member.plans or self._draining
        return math.inf if stopped else self.worker.turn(now)

    def _begin(self, function: Callable[[T], object], items: Iterable[T]) -> Iterable[object]:
        """As many at a time as the runner renews, and nobody waits for them."""
        self._renewals.extend(partial(function, item) for item in items)
        for _ in range(min(len(self._renewals), RENEWERS - self._renewers)):
            self._renewers += 1
            self._tasks.start(self._renew)
        return ()

    def _renew(self) -> None:
        while self._renewals:
            self._renewals.popleft()()
        self._renewers -= 1

    def _each(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """A few at a time, as the runner's pools do."""
        work = list(items)
        if len(work) <= 1:
            return [function(item) for item in work]
        answers: dict[int, R] = {}
        queue = iter(enumerate(work))
        caller = self._tasks.current

        def write() -> None:
            for place, item in queue:
                answers[place] = function(item)
            if len(answers) == len(work):
                self._tasks.wake(caller)

        for _ in range(min(WRITERS, len(work))):
            self._tasks.start(write)
        while len(answers) < len(work):
            self._tasks.sleep_until(math.inf)
        self._stand_still()
        return [answers[place] for place in range(len(work))]

    def _clock(self) -> float:
        return self._offset + self.member.rate * self._tasks.now

    # What befalls it

    def _stand_still(self) -> None:
        while self._tasks.now < self._asleep_until and not self._dead:
            self._tasks.sleep_until(self._asleep_until)
        if self._dead:
            raise Killed

    def _fall_asleep(self, seconds: float) -> None:
        self._asleep_until = max(self._asleep_until, self._tasks.now + seconds)
        self._say("nap", seconds)

    def _crash(self) -> None:
        if not self._dead:
            self._dead = True
            self._say("crash")

    def _restart(self) -> None:
        """Whoever watches over the process starts it again."""
        if not self._dead:
            self._crash()
            self._world.join(evolve(self.member, starts=self._tasks.now + RESTART_SECONDS))

    def _leave(self) -> None:
        """As the runner drains."""
        self._stand_still()
        self._say("leave")
        self._draining = True
        until = self._tasks.now + DRAIN_SECONDS
        self.worker.close()
        while self.worker.holdings and self._tasks.now < until:
            for holding in self.worker.holdings:
                holding.ask_release()
            self._each(self.part, self.worker.holdings)
            self.wait(0.5)
        self._dead = True
        self._say("gone")

    def _handle(self, delivery: Delivery) -> None:
        first, last = (int(delivery.records[end].sequence_number) for end in (0, -1))
        self._world.history.handed.append(Handed(self._tasks.now, self.process_id, delivery.shard, first, last))

    def _say(self, what: Doing, seconds: float = 0.0) -> None:
        self._world.history.deeds.append(Deed(self._tasks.now, what, self.process_id, seconds))
