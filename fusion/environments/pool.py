"""Run conversations in guarded processes, an event loop each, and attribute each failure to the one that caused it.

Invariants:
1. Every order that `begin` takes gets exactly one result, unless `end` or `close` comes first.
2. An environment that raises, exceeds a limit of time or memory, returns something else, blocks its process's loop or
   ends the process fails its own conversation. Steps of others in that process are repeated in another one; only where
   the process ends while none of its code runs (killed from outside), all its steps fail.
3. A conversation without a live environment is continued in a fresh one, which must say again what was observed
   (`diverged` otherwise). So whoever holds actions and digests loses nothing with a process.
4. No child survives `close` or the end of this process, however it ends, nor does a process that a child starts.

One thread of the pool reads and writes the sockets; other threads leave orders and take results."""

import heapq
import mmap
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from fusion.environments.child import NUMBER
from fusion.environments.config import BUILT_IN, EnvironmentConfig
from fusion.environments.interface import StepOrder, Stepped, Task
from fusion.environments.wire import EndOrder, NextOrder, Order, Reply, decode_reply, pack_order
from fusion.rewards.process import GuardedPool, GuardedProcess

RECEIVE_BYTES, MAX_NUMBER, CHECK_S = 1 << 12, 0xFFFFFF00, 0.5
GRACE_S = 5.0
"""Maximum seconds after an order's timeout in which a child's loop must report it"""


class PostedOrder:
    """An order and who takes its result. `sent`, `due` (`time.monotonic`): when a child got it, is to have replied."""

    def __init__(self, order: Order, deliver: "Callable[[PostedOrder, Stepped], None]") -> None:
        self.order, self.deliver = order, deliver
        self.sent = self.due = 0.0


class EnvChild(GuardedProcess[Reply | str]):
    """A child with environments. `open`: its unfinished orders by number; `live`: conversations whose environment is in
    it; `heard`: when it replied last."""

    decode = staticmethod(decode_reply)

    def __init__(self, config: EnvironmentConfig) -> None:
        target = config.path if config.name == "custom" else BUILT_IN[config.name]
        names = ("label", "memory_mib", "step_timeout_s", "episode_timeout_s", "tools")
        options = {name: getattr(config, name) for name in names}
        culprit_fd = os.memfd_create("culprit")
        try:
            os.ftruncate(culprit_fd, NUMBER.size)
            self._culprit = mmap.mmap(culprit_fd, NUMBER.size)
            options |= {"target": target, "culprit_fd": culprit_fd}
            super().__init__("fusion.environments.child", options, fds=[culprit_fd])
        finally:
            os.close(culprit_fd)
        self.open: dict[int, PostedOrder] = {}
        self.live: set[str] = set()
        self.heard = 0.0

    @property
    def load(self) -> int:
        return len(self.open) + len(self.live)

    @property
    def culprits(self) -> list[int] | None:
        """Unfinished orders whose code runs, or ran last before the process ended: one, or none where an environment
        that has ended was closing; None: no code of an environment runs."""
        (number,) = NUMBER.unpack(self._culprit[:])
        return [one for one in (number,) if one in self.open] if number else None


class EnvPool(GuardedPool[EnvChild]):
    """Run environments in `config.workers` children. `begin`, `poll` and `end` are called by one thread. The
    constructor starts the children, which are kept alive, and returns when they are ready.
    ``on_result``: called on a thread of the pool when `poll` has a result.
    Raise ValueError: the config is invalid, or the user's class cannot be loaded (names `environment.path`)."""

    def __init__(self, config: EnvironmentConfig, on_result: Callable[[], None]) -> None:
        config.validate()
        super().__init__(lambda: EnvChild(config), workers=config.workers, label=config.label)
        self._config, self._on_result = config, on_result
        self._home: dict[str, EnvChild] = {}
        self._waiting: deque[PostedOrder] = deque()
        self._due: list[tuple[float, int, EnvChild]] = []
        self._number = 0
        self._begun: dict[str, PostedOrder] = {}
        self._orders: deque[PostedOrder] = deque()
        self._results: deque[tuple[PostedOrder, Stepped]] = deque()
        self._is_ready = threading.Event()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()
        self._is_ready.wait()
        if self._start_error:
            self.close()
            raise ValueError(self._start_error)

    def reset(self, tasks: Sequence[tuple[Task, int]]) -> list[Stepped]:
        """Return the first messages of each (task, seed), in order, or why there are none. Nothing stays open.
        Raise RuntimeError: the pool is closed, or another thread closes it meanwhile."""
        results: dict[PostedOrder, Stepped] = {}
        finished = threading.Event()

        def deliver(work: PostedOrder, result: Stepped) -> None:
            results[work] = result
            if len(results) == len(works):
                finished.set()

        works = [PostedOrder(StepOrder("", task, seed), deliver) for task, seed in tasks]
        self._post(works)
        while works and not finished.wait(CHECK_S):
            self._check_open()
        return [results[work] for work in works]

    def begin(self, step: StepOrder) -> None:
        """Order the next step of a conversation that has none under way."""
        assert step.id not in self._begun, f"{step.id} has a step under way"
        self._begun[step.id] = work = PostedOrder(step, self._deliver)
        self._post([work])

    def poll(self) -> list[Stepped]:
        """Return the steps that have ended since the last call; never blocks.
        Raise RuntimeError: the pool is closed."""
        self._check_open()
        ended = []
        while self._results:
            work, stepped = self._results.popleft()
            if self._begun.get(stepped.id) is work:  # else it ended meanwhile
                del self._begun[stepped.id]
                ended.append(stepped)
        return ended

    def end(self, ids: Collection[str]) -> None:
        """Close the environments of conversations, whether or not they have any; no step of them is returned later."""
        for id in ids:
            self._begun.pop(id, None)
        self._post([PostedOrder(EndOrder(id), self._deliver) for id in ids])

    def close(self) -> None:
        """Kill every child; idempotent."""
        if not self._closed:
            self._closed = True
            self._wake.send(b"x")
            self._thread.join()
            self._wake.close()

    def _check_open(self) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the pool of environments is closed")

    def _post(self, works: Sequence[PostedOrder]) -> None:
        self._check_open()
        self._orders.extend(works)
        self._wake.send(b"x")

    def _deliver(self, work: PostedOrder, result: Stepped) -> None:
        self._results.append((work, result))
        self._on_result()

    # What follows runs on the thread of the pool.

    def _run(self) -> None:
        try:
            self._fill()
            while not self._closed:
                self._process_events()
                if self._start_error or all(child.ready for child in self._children):
                    self._is_ready.set()
        finally:
            self._is_ready.set()
            self._end_all()
            self._selector.close()
            self._woken.close()

    def _process_events(self) -> None:
        """Wait for the next event (an order, a reply, a socket that accepts data, a deadline) and process it."""
        starting = [child.deadline for child in self._children if not child.ready]
        next_s = min([*starting, *(self._due[0][:1] if self._due else ())], default=float("inf")) - time.monotonic()
        for key, events in self._selector.select(None if next_s == float("inf") else max(next_s, 0.0)):
            child = key.data
            if child is None:
                self._woken.recv(RECEIVE_BYTES)
            elif events & selectors.EVENT_WRITE:
                child.flush()
                self._watch(child)
            if child is not None and events & selectors.EVENT_READ:
                self._read(child)
        while self._orders:
            self._fill()
            self._take(self._orders.popleft())
        self._expire()

    def _take(self, work: PostedOrder) -> None:
        """Give an order to the child that has its conversation, else to the one that has least to do."""
        id = work.order.id
        child = self._home.get(id)
        if isinstance(work.order, EndOrder):
            self._waiting = deque(posted for posted in self._waiting if posted.order.id != id)
            if child is not None:
                self._forget(id)
                child.open = {n: one for n, one in child.open.items() if one.order.id != id}
                self._send(child, work.order)
            return
        if child is None:
            child = min((child for child in self._children if child.ready), key=lambda one: one.load, default=None)
        if child is not None:
            self._dispatch(child, work)
        elif self._children:
            self._waiting.append(work)
        else:
            self._settle(work, Reply("died", f"no process could be started: {self._start_error}", 0.0))

    def _dispatch(self, child: EnvChild, work: PostedOrder) -> None:
        limit_s, order = self._config.step_timeout_s, work.order
        if isinstance(order, StepOrder) and order.id in child.live:
            order = NextOrder(order.id, order.actions[-1])
        elif isinstance(order, StepOrder) and order.actions:  # a reset, and its turns again
            limit_s = min(limit_s * (1 + len(order.actions)), self._config.episode_timeout_s)
            child.live.add(order.id)
            self._home[order.id] = child
        number = self._send(child, order)
        work.sent = time.monotonic()
        work.due = work.sent + limit_s + self._grace_s
        child.open[number] = work
        heapq.heappush(self._due, (work.due, number, child))

    def _send(self, child: EnvChild, order: Order) -> int:
        self._number = self._number % MAX_NUMBER + 1
        child.send(pack_order(self._number, order))
        self._watch(child)
        return self._number

    def _read(self, child: EnvChild) -> None:
        replies, alive = child.receive()
        child.heard = time.monotonic()
        for number, reply in replies:
            if isinstance(reply, str):
                self._start(child, reply)
            elif (work := child.open.pop(number, None)) is not None:
                self._settle(work, reply)
                if reply.failure == "memory":
                    child.retired = True
        if child in self._children and (child.retired or not alive):
            self._handle_exit(child)

    def _start(self, child: EnvChild, error: str) -> None:
        if error:
            self._drop(child)
            self._fail_start(error)
            return
        child.ready, self._start_error = True, ""
        self._retake()

    def _fail_start(self, error: str) -> None:
        self._start_error = error
        if not self._children:
            self._retake()

    def _settle(self, work: PostedOrder, reply: Reply) -> None:
        if reply.failure or reply.done:
            self._forget(work.order.id)
        work.deliver(work, reply.stepped(work.order.id))

    def _forget(self, id: str) -> None:
        if child := self._home.pop(id, None):
            child.live.discard(id)

    def _handle_exit(self, child: EnvChild) -> None:
        culprits = child.culprits
        end, trace = self._drop_ended(child)
        detail = f"the process of this environment {end}\n{trace}".rstrip()
        if not child.ready:
            self._fail_start(f"{self.label}: {detail}")
            return
        numbers = [] if child.retired else [*child.open] if culprits is None else culprits
        self._fail(child, "died", detail, numbers=numbers)

    def _expire(self) -> None:
        """End each child that has not replied to an order in time and is silent: its loop is blocked."""
        now = time.monotonic()
        for child in [child for child in self._children if not child.ready and child.deadline <= now]:
            self._fail_start(self._drop_late(child))
        while self._due and self._due[0][0] <= now:
            _, number, child = heapq.heappop(self._due)
            if number not in child.open:
                continue
            if child.heard + self._grace_s > now:
                heapq.heappush(self._due, (child.heard + self._grace_s, number, child))
                continue
            culprits, trace = child.culprits, child.dump_stack()
            self._drop(child)
            detail = f"blocked its process; its stack was\n{trace}".rstrip()
            late = [one for one, work in child.open.items() if work.due <= now]
            self._fail(child, "timeout", detail, numbers=late if culprits is None else culprits)

    def _fail(self, child: EnvChild, kind: str, detail: str, numbers: Collection[int]) -> None:
        """Fail orders of a child that has ended; give the others to other children."""
        for number in numbers:
            work = child.open.pop(number)
            self._settle(work, Reply(kind, detail, time.monotonic() - work.sent))
        self._waiting.extend(child.open.values())
        child.open.clear()
        self._fill()
        self._retake()

    def _retake(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for work in waiting:
            self._take(work)

    @property
    def _grace_s(self) -> float:
        return min(self._config.step_timeout_s, GRACE_S)

    def _drop(self, child: EnvChild, grace_s: float = 0.0) -> int:
        for id in [*child.live]:
            self._forget(id)
        return super()._drop(child, grace_s)
