"""Collect finished samples of an engine and send several at once, by the rules of `fusion/rollout/engine_stage.py`.

Sent are samples when there are `MAX_PENDING`, at the end of the step in which the oldest has waited for
`MAX_PENDING_S` since the last message, or when the engine has nothing else to do.

Invariant: every sample is sent once."""

from collections.abc import Callable, Mapping

from stalesync.simulator.clock import Clock

MAX_PENDING, MAX_PENDING_S = 64, 0.2
"""As in `fusion/rollout/engine_stage.py`"""


class Outbox:
    """``end_of_step``: returns the time at which the engine's current step ends; ``deliver``: sends the response
    tokens of samples by id."""

    def __init__(
        self, clock: Clock, end_of_step: Callable[[], float], deliver: Callable[[Mapping[str, int]], None]
    ) -> None:
        self._clock, self._end_of_step, self._deliver = clock, end_of_step, deliver
        self._samples: dict[str, int] = {}
        self._sent_s = 0.0
        """Time of the last message, or of the engine's start"""
        self._arranged = False
        """Whether `_send_later` will be called"""

    def open(self, time: float) -> None:
        """Begin a stage of the engine."""
        self._sent_s = time

    def add(self, id: str, response_tokens: int) -> None:
        self._samples[id] = response_tokens

    def send_if_due(self) -> None:
        """Send samples, or arranges that they are sent when they have waited long enough. Called between two steps."""
        if not self._samples:
            return
        due_s = self._sent_s + MAX_PENDING_S
        if len(self._samples) >= MAX_PENDING or self._clock.now > due_s:
            self.send()
        elif not self._arranged:
            self._arranged = True
            self._clock.at(due_s, self._send_later)

    def send(self) -> None:
        """Send all samples now."""
        if self._samples:
            samples, self._samples = self._samples, {}
            self._sent_s = self._clock.now
            self._deliver(samples)

    def _send_later(self) -> None:
        self._arranged = False
        if self._samples:
            self._clock.at(self._end_of_step(), self.send)
