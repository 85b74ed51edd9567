"""Decide how many groups are admitted, and how many waiting requests which engine receives. Pure.

    ledger    how many groups may be admitted ─┐
    running   how few requests engines have   ─┼─► AdmitGroups(count) ─► buffer ─► Dispatch(requests by engine)
    spec      bounds of an engine             ─┘

The ledger decides what may be admitted and the buffer which request goes where; this file decides how many. `Admission`
decides when, and states the rules."""

from collections.abc import Iterator, Mapping, Sequence

from fusion.rollout import EngineRoom, Entry, RequestBuffer, SuspendedSample
from stalesync.policy.admission_spec import AdmissionSpec
from stalesync.policy.commands import AdmitGroups, Command, Dispatch, DispatchedRequests
from stalesync.policy.staleness import StalenessLedger


class RunningEngines:
    """Track the number of requests of each running engine, their total, and the engines with few requests, so that an
    event costs O(1) instead of a scan of the buffer. Invariants: `total` is the sum of the counts; an engine is in
    `low` exactly if it runs and has at most ``low_requests``."""

    def __init__(self, low_requests: int) -> None:
        self._low_requests = low_requests
        self._counts: dict[int, int] = {}
        self.total = 0
        self.low: set[int] = set()

    def update(self, engine: int, count: int) -> None:
        """Record that a running engine has ``count`` requests; it starts if it did not run."""
        self.total += count - self._counts.get(engine, 0)
        self._counts[engine] = count
        (self.low.add if count <= self._low_requests else self.low.discard)(engine)

    def remove(self, engine: int) -> None:
        """Record that an engine has stopped."""
        self.total -= self._counts.pop(engine)
        self.low.discard(engine)

    def __contains__(self, engine: int) -> bool:
        return engine in self._counts

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._counts))

    def __len__(self) -> int:
        return len(self._counts)


class Supply:
    def __init__(
        self, spec: AdmissionSpec, ledger: StalenessLedger, *, buffer: RequestBuffer, running: RunningEngines
    ) -> None:
        self._spec, self._ledger, self._buffer, self._running = spec, ledger, buffer, running
        self.steps_left = 0
        """Remaining steps of the run, including the one that is under way"""
        self.kv_tokens: int | None = None
        """Capacity of an engine's KV cache, once it is known"""
        self._num_requested = 0
        """Number of groups in the last `AdmitGroups` that are not admitted yet"""
        self._cancelled: dict[str, str] = {}
        """Group that is not generated any further → why; until no engine has a request of it"""

    def observe_admitted(self, prompt_tokens: Mapping[str, int]) -> None:
        """Record the groups of `AdmitGroups` with the length of their prompts; their requests wait from now on."""
        expected = self._num_requested
        assert len(prompt_tokens) == expected, f"{len(prompt_tokens)} groups were admitted, expected {expected}"
        self._num_requested = 0
        steps = self._ledger.next_steps(expected)
        self._ledger.admit(prompt_tokens)
        for (group, length), step in zip(prompt_tokens.items(), steps, strict=True):
            ids = [f"{group}/{member}" for member in range(self._spec.group_size)]
            self._buffer.add(group, ids, prompt_tokens=length, max_tokens=self._spec.max_response_tokens, step=step)

    def admit(self, engines: Sequence[int] | None = None) -> Iterator[Command]:
        """Admit as many groups as the ledger allows, the remaining steps can train, and these engines (None: those
        that run) can start; with `histopipe`, which ranks the groups of a step, also those that have to wait."""
        count = self.num_admissible
        if count > 0 and self._spec.ahead and self._spec.histopipe is None:
            count = min(count, self._groups_to_begin(self._spec.max_requests, engines))
        if count > 0:
            self._num_requested = count
            yield AdmitGroups(count)
            assert not self._num_requested, "AdmitGroups must be followed by observe_admitted"

    def dispatch(self, engines: Sequence[int] | None = None, last: bool = False) -> Iterator[Command]:
        """Dispatch waiting requests to these engines (None: those that run), and start those that do not run.
        ``last``: of the step."""
        starting: frozenset[int] = frozenset()
        if engines is None:
            engines = tuple(self._running)
        else:
            starting = frozenset(engine for engine in engines if engine not in self._running)
        if not starting and not (engines and self._buffer.num("waiting")):
            return
        requests_by_engine = {
            engine: _columns(entries)
            for engine, entries in self._buffer.dispatch(engines, self._room, slots=self._spec.engine_slots).items()
            if entries or engine in starting
        }
        for engine in requests_by_engine:
            self._running.update(engine, self._buffer.num_running_on(engine))
        if requests_by_engine:  # else the left KV is told with a later one
            left_kv = self._buffer.take_left_kv()
            yield Dispatch(requests_by_engine, left_kv if self._spec.keeps_kv else {}, starting, last)

    @property
    def dispatches_once(self) -> bool:
        """Whether a step dispatches all that it generates at its start."""
        return not (self._spec.binds_late or self._spec.filters or self._ledger.tokens_per_step is not None)

    def take_back(self, engine: int, suspended: Sequence[SuspendedSample]) -> None:
        """Record that an engine has suspended these requests, which wait again or are away."""
        for one in suspended:
            self._buffer.suspend(engine, one)
        for group in [*self._cancelled]:
            self.end_cancelled(group)

    def cancel(self, group: str, why: str) -> None:
        """Generate a group no further. It fails once no engine has a request of it."""
        self._cancelled[group] = why
        self._buffer.end(group)
        self.end_cancelled(group)

    def end_cancelled(self, group: str) -> bool:
        """Return whether a group is cancelled; it fails if no engine has a request of it."""
        if group not in self._cancelled:
            return False
        if not self._buffer.num_unfinished(group):
            self._buffer.remove(group)
            self._ledger.fail(group, self._cancelled.pop(group))
        return True

    def count(self, engine: int) -> None:
        """Update the number of requests of an engine if it runs: samples may arrive after their engine has stopped."""
        if engine in self._running:
            self._running.update(engine, self._buffer.num_running_on(engine))

    @property
    def num_admissible(self) -> int:
        """Number of groups that the ledger allows and the remaining steps can train."""
        step_places = self.steps_left * self._ledger.expected_groups - self._ledger.trained_now
        left = step_places - self._ledger.num_untrained
        return max(0, min(left, self._ledger.may_admit))

    def _groups_to_begin(self, max_requests: int, engines: Sequence[int] | None) -> int:
        """Return the number of groups that these engines (None: those that run) could start now."""
        if engines is None:
            num_engines, held = len(self._running), self._running.total
        else:
            num_engines, held = len(engines), sum(self._buffer.num_running_on(engine) for engine in engines)
        room = max_requests * num_engines - held - self._buffer.num("waiting")
        return -(-room // self._spec.group_size)

    @property
    def _room(self) -> EngineRoom | None:
        """The bounds of an engine; None: it receives all requests."""
        if not self._spec.binds_late:
            return None
        kv_tokens = self.kv_tokens if self._spec.chunk_tokens else None  # a whole response is never reserved
        return EngineRoom(self._spec.max_requests, kv_tokens, self._spec.chunk_tokens)


def _columns(entries: Sequence[Entry]) -> DispatchedRequests:
    return DispatchedRequests(
        ids=[entry.name for entry in entries],
        groups=[entry.group for entry in entries],
        earlier=[entry.earlier for entry in entries],
        kv_ranks=[entry.kv[1] if entry.kv and entry.kv[0] == entry.engine else None for entry in entries],
        priorities=[entry.priority for entry in entries],
        kv_tokens=[entry.kv_tokens for entry in entries],
        kv_engines=[
            entry.kv[0] if entry.kv and entry.kv_tokens and entry.kv[0] != entry.engine else None for entry in entries
        ],
        observations=[entry.observation for entry in entries],
    )
