"""Plan what is killed in which run, and when. Pure: everything is drawn from the seed.

    chain   one run folder: starts that are each ended by a kill, and a last one that goes to its end
    start   kills that the run must survive, at steps, then the one that ends it (not in the last start)

Invariants (tests/scripts/test_chaos.py):
1. Chain n depends on the seed and n only.
2. Of every twelve chains in a row, from a multiple of twelve on, each deployment runs once at each bound.
3. Of the kills of a start only the last one ends it, and the last start has none that does. Their steps ascend.
4. Steps ascend from start to start, and lie within the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from random import Random

DEPLOYMENTS = ("colocated", "separate", "hybrid", "full")
BOUNDS = (0, 1, 2)

STEPS = 18
"""Training steps of a run"""
NUM_ENDS = 3
"""Starts of a chain that are ended by a kill"""

START_S = 10.0
"""Within this time of the start of its process, a run that is killed while it starts is killed"""
BIRTH_S = 2.0
"""… or within this time of the start of another victim"""
STEP_S = 0.4
"""Kills at a step come within this time of its end"""

AT_START = 0.3
"""Share of the kills that end a run while it starts"""

ENDS = {
    "controller": 5,
    "worker": 3,
    "queue": 2,
    "raylet": 2,
    "gcs": 2,
    "disk": 2,
    "shared memory": 1,
}
"""Victims whose death ends a run, with weights; `disk` and `shared memory` are filled. A queue with a journal
survives."""

SIGNALS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGTERM", "SIGINT")
"""Of the controller; all others are killed by SIGKILL"""

LOGS = "logs"
"""Fills the disk between two checkpoints, until the run has warned: it must go on"""

FILLED = ("disk", "shared memory", LOGS)

FILLS_EVERY = 5
"""Of so many chains in a row, the disk of one is filled between checkpoints"""

CONVERSES_EVERY = 3
"""Of so many chains in a row, the model of one speaks in several turns"""

SELDOM = 9
"""Steps between the checkpoints of a chain in which that is done …"""
AFTER_SAVE, BEFORE_SAVE = 2, 5
"""… at least so many steps after the last one, which is written meanwhile, and before the next one"""


@dataclass(frozen=True)
class Kill:
    """What is killed, and when.

    Attributes:
        victim: a key of ENDS, `shard`, `reward` (in a chain that converses, its environments) or LOGS.
        signal: by which; "": the victim is filled.
        step: the kill comes ``delay_s`` after the end of this step; None: after the victim's process has started.
        pick: chooses among several processes, 0 to 1.
        ends: whether the run must end; else it must go on.
    """

    victim: str
    signal: str
    step: int | None
    delay_s: float
    pick: float
    ends: bool

    @property
    def filled(self) -> bool:
        return self.victim in FILLED

    def __str__(self) -> str:
        when = "at its start" if self.step is None else f"after step {self.step}"
        what = f"{self.victim} full" if self.filled else f"{self.signal} to {self.victim}"
        return f"{what} {when} + {self.delay_s:.2f} s"


@dataclass(frozen=True)
class Chain:
    """One run folder. ``starts``: the kills of each start."""

    index: int
    deployment: str
    bound: int
    durability: str
    save_every: str
    chunk_tokens: int | None
    starts: tuple[tuple[Kill, ...], ...]

    @property
    def converses(self) -> bool:
        """Whether its model speaks in several turns."""
        return self.index % CONVERSES_EVERY == 1

    @property
    def name(self) -> str:
        return f"{self.deployment} s={self.bound} {self.durability}{' conversations' if self.converses else ''}"


def plan_chain(seed: int, index: int) -> Chain:
    """Return chain number ``index``, from 0."""
    cases = list(product(DEPLOYMENTS, BOUNDS))
    Random(f"{seed}/round/{index // len(cases)}").shuffle(cases)
    deployment, bound = cases[index % len(cases)]
    random = Random(f"{seed}/chain/{index}")
    fills = index % FILLS_EVERY == 0
    durability = "memory" if fills else random.choice(("memory", "journal"))  # a journal is written at every step
    edges = [round(STEPS * number / NUM_ENDS) for number in range(NUM_ENDS + 1)]
    starts, reached = [], 0
    for first, last in zip(edges, edges[1:], strict=False):
        end = _end(random, durability, random.randint(first + 2, last))
        reached = reached if end.step is None else end.step
        starts.append((*_survived(random, durability, first + 1, end.step, fills), end))
    return Chain(
        index=index,
        deployment=deployment,
        bound=bound,
        durability=durability,
        save_every=f"{SELDOM}" if fills else random.choice(("1", "1", "2", "0.5s")),
        chunk_tokens=random.choice((None, 4)) if bound else None,
        starts=(*starts, _survived(random, durability, reached + 1, STEPS, fills)),
    )


def _end(random: Random, durability: str, step: int) -> Kill:
    victims = [victim for victim in ENDS if victim != "queue" or durability == "memory"]
    victim = random.choices(victims, [ENDS[one] for one in victims])[0]
    at_start = random.random() < AT_START
    within_s = STEP_S if not at_start else START_S if victim == "controller" or victim in FILLED else BIRTH_S
    signal = random.choice(SIGNALS) if victim == "controller" else "" if victim in FILLED else "SIGKILL"
    return Kill(
        victim=victim,
        signal=signal,
        step=None if at_start else step,
        delay_s=random.uniform(0, within_s),
        pick=random.random(),
        ends=True,
    )


def _survived(random: Random, durability: str, first: int, last: int | None, fills: bool) -> tuple[Kill, ...]:
    """Draw up to two kills at steps from ``first`` to before ``last``; none if the run is killed while it starts, or if
    there is no such step. ``fills``: the disk may be filled where the next checkpoint is far."""
    count = random.choice((1, 2) if fills else (0, 1, 1, 2))
    if last is None or first >= last:
        return ()
    victims = ("reward", "shard", "queue") if durability == "journal" else ("reward", "shard")
    steps = sorted(random.randint(first, last - 1) for _ in range(count))
    kills = []
    for step in steps:
        far = fills and AFTER_SAVE <= step % SELDOM <= SELDOM - BEFORE_SAVE
        victim = LOGS if far else random.choice(victims)
        signal, delay_s = "" if victim == LOGS else "SIGKILL", random.uniform(0, STEP_S)
        kills.append(Kill(victim, signal, step, delay_s, pick=random.random(), ends=False))
    return tuple(kills)
