"""Decide when cards that train leave generation before a step has its groups, and what they train meanwhile. Pure.

    the other engines    generate ──────────────────────────────────────────────────► the step has its groups
    cards that train     generate ─► return ─► accumulate ─► accumulate ─► … ───────► train the rest, update
                                     └─► their requests go to the other engines

In the tail of a step few requests are left: the other engines decode all of them about as fast as all engines do. The
gradients of groups that are ready are then computed in the tail, not behind it. That saves at most the seconds of the
tail, less those that the cards take to return. Both are measured in the run, whether cards are lent or not, as running
means; until both are known, no card is lent. Cards that only train lose nothing: they accumulate whenever a part is
ready.

Invariants (property-tested in tests/stalesync/policy/test_lending.py): cards that generate return at most once after
`begin_generation`, only in the tail, if the others can decode all requests at once and a part is ready, and only if the
measured tail is longer than the measured return: `GAIN` times as long if they were not lent when this was decided last
(hysteresis). A part has at least `PART` of the groups of a step. Where generation ends before its tail begins, its tail
counts as 0 seconds; where it was interrupted, its tail is not measured."""

from math import ceil

LENDING_TAIL = 0.2
"""The tail begins when at most this share of a step's samples is to be generated. From 0.1 to 0.35: equal within 3 %"""
PART = 0.05
"""Share of a step's groups that is accumulated at once, at least: a part is divided over all replicas"""
GAIN = 2.0
"""How many times as long as the return the tail must be before cards are lent that were not lent before"""
NEWEST = 0.3
"""Weight of the newest figure in a running mean"""


class Lending:
    """Make the decisions of a run. ``generates``: whether cards that train also generate; else they only train;
    ``engine_slots``: requests that an engine decodes at a time; ``step_samples``: samples of a step."""

    def __init__(self, *, generates: bool, engine_slots: int, step_samples: int) -> None:
        self._generates, self._engine_slots, self._step_samples = generates, engine_slots, step_samples
        self.mean_tail_s: float | None = None
        """Seconds between the beginning of the tail and the last group of a step; None: not measured yet"""
        self.mean_return_s: float | None = None
        """Seconds that the cards take to return to training; None: not measured yet"""
        self._tail_s: float | None = None
        """Seconds since the tail has begun; None: it has not"""
        self._lent_s: float | None = None
        """Seconds since the cards have returned; None: they have not, or do not generate"""
        self._lends = False
        """What was decided last"""
        self._interrupted = False
        """Whether weights were published again since generation began"""

    def begin_generation(self) -> None:
        """Record that the cards generate, with new weights."""
        self._tail_s, self._lent_s, self._interrupted = None, None, False

    def interrupt(self) -> float:
        """Record that weights are published again before the step has its groups, so that the cards generate again:
        its tail is not measured. Return for how many seconds they were lent until now."""
        lent_s, self._tail_s, self._lent_s, self._interrupted = self._lent_s or 0.0, None, None, True
        return lent_s

    def observe_requests(self, num_requests: int) -> bool:
        """Record how many requests are waiting or running; return whether cards may return now: they only train, or
        the tail has begun."""
        if self._tail_s is None and num_requests <= LENDING_TAIL * self._step_samples:
            self._tail_s = 0.0
        return not self._generates or self._tail_s is not None

    def observe_seconds(self, seconds: float) -> None:
        """Record that generation has gone on for some time since the last call."""
        if self._tail_s is not None:
            self._tail_s += seconds
        if self._lent_s is not None:
            self._lent_s += seconds

    def observe_return(self, seconds: float) -> None:
        """Record how long the cards took to return to training."""
        self.mean_return_s = _mean(self.mean_return_s, seconds)

    def end_generation(self) -> float:
        """Record that the step has its groups; return for how many seconds cards that generate were lent."""
        if not self._interrupted:
            self.mean_tail_s = _mean(self.mean_tail_s, self._tail_s or 0.0)
        lent_s, self._tail_s, self._lent_s = self._lent_s or 0.0, None, None
        return lent_s

    def returns(self, num_ready: int, num_groups: int, *, num_requests: int, num_others: int) -> bool:
        """Decide whether the cards that train return now. Called where `observe_requests` allows it, until they do.
        ``num_ready``: groups that may be trained now; ``num_groups``: of a step; ``num_requests``: that are waiting or
        running; ``num_others``: running engines that share no card with the trainer."""
        if not self.has_part(num_ready, num_groups):
            return False
        if not self._generates:
            return True
        if num_requests > self._engine_slots * num_others:
            return False
        self._lends = self._pays
        if self._lends:
            self._lent_s = 0.0
        return self._lends

    @staticmethod
    def has_part(num_ready: int, num_groups: int) -> bool:
        """Whether the groups that may be trained now are enough to be accumulated. ``num_groups``: of a step."""
        return num_ready >= max(1, ceil(PART * num_groups))

    @property
    def _pays(self) -> bool:
        """Whether the tail is long enough for cards to be lent in it."""
        if self.mean_tail_s is None or self.mean_return_s is None:
            return False
        return self.mean_tail_s > self.mean_return_s * (1.0 if self._lends else GAIN)


def _mean(mean_s: float | None, seconds: float) -> float:
    return seconds if mean_s is None else (1 - NEWEST) * mean_s + NEWEST * seconds
