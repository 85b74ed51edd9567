"""State what the controller and the queue cost, measured once, with the source of each constant.

The constants are of a machine that computes in about half of the time of the tests' reference (`tests/machine.py`);
docs/figures.md has the commands. The controller is one process and the queue's actor is another: what they take grows
with samples and cards, and nothing divides it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Overheads:
    """Seconds of the host's work in a run, not of the cards."""

    controller_s_per_sample: float = 60e-6 / 8
    """CPU of the whole controller for one sample. docs/figures.md, "How costs grow": 40 to 60 us for a group of 8 at 64
    to 16,384 groups a step, synchronous; the largest counts."""
    call_s: float = 150e-6
    """CPU of the controller for one call of a card and its answer. Measured: a no-op call of a Ray actor, 512 at a
    time, Ray 2.60, on that machine: 153 us (8 at a time: 239 us). A stage of every card is one call for each."""
    queue_s_per_sample: float = 1 / 583e3 + 2 / 1.7e6 + 2 / 2.0e6
    """Time of the queue's actor for one sample. docs/figures.md, "How costs grow", at 100k to 1M samples in the queue:
    583k puts per second, 1.7M gets and 2.0M acks, which two tasks need."""
    arrival_s: float = 13.8e-3 / 2
    """Latency from a put to the controller. docs/figures.md, "The sample queue": put, get and ack of a small sample
    take 13.8 ms, of which the controller waits for about half."""
