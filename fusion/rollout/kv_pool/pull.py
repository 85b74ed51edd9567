"""Decide which KV is pulled from other machines, and how long an engine waits for it. Pure: no socket, no clock.

    prefill steps ─► seconds a token ─┐
                                      ├─► patience_s: seconds to wait for KV of n tokens; 0: it is computed again
    pulls from a machine ─► s a token ┘

An engine waits for KV at most as long as it would take to compute it. So a request costs at most twice what it costs
without a pull, whatever the link does (the ski-rental rule: Karlin et al., "Competitive snoopy caching", 1988), and no
timeout has to be configured. Times are measured in this run: where nothing was prefilled yet, nothing is pulled.

Invariants (tests/rollout/kv_pool/test_pull.py): patience is never longer than the prefill of the same tokens takes at
the measured rate; a machine from which pulls have taken longer than that is tried at every `RETRY_EVERY`-th request
only; a machine that is gone is never tried again.

Cost: O(1) for each call."""

from dataclasses import dataclass, field

RETRY_EVERY = 16
"""Requests of a slow machine of which one is pulled all the same, since its link may be free again"""

NEWEST_WEIGHT = 0.25
"""Weight of the newest measurement in a rate: four of them outweigh all earlier ones"""


@dataclass
class OtherMachine:
    """Another machine. ``s_per_token``: of pulls from it, None: not known; ``skipped``: requests since the last pull;
    ``gone``: it does not answer any more."""

    s_per_token: float | None = None
    skipped: int = 0
    gone: bool = False


@dataclass
class PullPlan:
    """The pulls of one rank. ``prefill_s_per_token``: None: not measured yet."""

    prefill_s_per_token: float | None = None
    _machines: dict[str, OtherMachine] = field(default_factory=dict)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Record a step that has computed the KV of ``tokens`` tokens."""
        self.prefill_s_per_token = _mean(self.prefill_s_per_token, seconds / tokens)

    def observe_pulled(self, machine: str, tokens: int, seconds: float) -> None:
        known = self._of(machine)
        known.s_per_token = _mean(known.s_per_token, seconds / tokens)

    def observe_late(self, machine: str, tokens: int, waited_s: float) -> None:
        """Record that KV has not arrived in time. Its rate is at least this."""
        known = self._of(machine)
        known.s_per_token = max(known.s_per_token or 0.0, waited_s / tokens)

    def observe_gone(self, machine: str) -> None:
        self._of(machine).gone = True

    def patience_s(self, machine: str, tokens: int) -> float:
        """Return for how long to wait for KV of a machine; 0: it is not asked. Count the request as skipped or not.
        ``tokens``: of which there would be KV."""
        known, prefill = self._of(machine), self.prefill_s_per_token
        if known.gone or prefill is None:
            return 0.0
        if known.s_per_token is not None and known.s_per_token >= prefill and known.skipped + 1 < RETRY_EVERY:
            known.skipped += 1
            return 0.0
        known.skipped = 0
        return tokens * prefill

    def _of(self, machine: str) -> OtherMachine:
        return self._machines.setdefault(machine, OtherMachine())


def _mean(earlier: float | None, newest: float) -> float:
    return newest if earlier is None else earlier + NEWEST_WEIGHT * (newest - earlier)
