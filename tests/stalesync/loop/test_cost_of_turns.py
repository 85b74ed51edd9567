"""A turn of a conversation costs the controller and the pool of environments the same however many precede it.

Decisions, buffer, bridge, chat template, queue and the pool with its process are real; engines only put rows. The file
is also the environment that the conversations have.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distqueue import PackedBatch
from fusion.environments import EnvironmentConfig, EnvPool, Message, Task, Turn
from fusion.environments.pool import EnvChild
from fusion.environments.render import Bridge
from fusion.rollout.partial_samples import RESUMED
from fusion.rollout.types import SuspendedSample, row_of
from stalesync.policy.conversations import ConversationSpec
from stalesync.prompts import ChatTemplate, DataConfig
from tests.environments.templates import FAMILIES, SPECIAL, tokenizer_of
from tests.stalesync.loop.conversing_world import World

NUM_GROUPS, GROUP_SIZE, ROUNDS = 8, 8, 3
TURNS, TURN_TOKENS = (2, 8, 32), 256


class Answering:
    """Answers each turn with sixty characters."""

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        return [{"role": "user", "content": "Go on."}]

    async def step(self, message: Message) -> Turn:
        return Turn([{"role": "user", "content": "and then? " * 6}])

    async def close(self) -> None: ...


class Talking:
    """Conversations of an engine whose turns end all at once."""

    def __init__(self, pool: EnvPool, news: threading.Semaphore, num_turns: int) -> None:
        template = ChatTemplate(DataConfig(), tokenizer_of(FAMILIES["qwen3"].template))
        spec = ConversationSpec(num_turns + 1, max_tokens=1 << 30, episode_timeout_s=1e9, retries=0)
        bridge = Bridge(template, [SPECIAL.index("<|im_end|>")])
        self.world = World(spec, num_groups=NUM_GROUPS, size=GROUP_SIZE, pool=pool, bridge=bridge)
        self._news, self.read_bytes = news, 0
        self.entries = [one for one in self.world.admission.buffer.entries.values() if one.state == "running"]
        self._text = ("0123456789" * TURN_TOKENS)[: TURN_TOKENS - 1]
        self._ids = [*template.tokenize([self._text])[0], SPECIAL.index("<|im_end|>")]
        assert len(self._ids) == TURN_TOKENS
        read = self.world.queue.read

        def counted(ids: Sequence[str], columns: Sequence[str]) -> PackedBatch:
            batch = read(ids, columns)
            self.read_bytes += batch.nbytes
            return batch

        self.world.queue.read = counted  # type: ignore[method-assign]

    def put_turns(self) -> list[SuspendedSample]:
        """Put the rows of a turn of each conversation, as engines do; return what these report."""
        suspended = []
        said = torch.tensor(self._ids)
        for entry in self.entries:
            before = entry.generated
            row = row_of(entry.id, before + len(said))
            columns: dict[str, Any] = {"partial_response": [said.repeat(1 + before // len(said))[: before + len(said)]]}
            columns |= {"turn": [self._text], "turn_tokens": [said]}
            self.world.queue.put(PackedBatch.from_samples([row], columns))
            if entry.earlier:
                self.world.queue.drop([entry.earlier], RESUMED)
            suspended.append(SuspendedSample(entry.id, before + len(said), row, (0, 0), turn=True))
        return suspended

    def answer(self, suspended: Sequence[SuspendedSample]) -> None:
        """Observe the ends of turns, until their observations are in their rows and the requests are dispatched."""
        world = self.world
        world.admission.observe_chunks_ended(0, suspended)
        world.conversing.poll()
        while any(entry.state == "away" for entry in self.entries):
            self._news.acquire()
            world.conversing.poll()
        for _ in world.admission.feed():
            pass
        assert all(entry.state == "running" for entry in self.entries)


@pytest.mark.extended
def test_a_turn_costs_the_same_however_many_precede_it():
    news, measured = threading.Semaphore(0), {}
    config = EnvironmentConfig(name="custom", path=f"{__file__}:Answering", max_turns=1000, workers=1)
    with counting_sent() as sent, EnvPool(config, news.release) as pool:
        for _ in range(ROUNDS):
            talking = Talking(pool, news, TURNS[-1])
            for number in range(1, TURNS[-1] + 1):
                suspended = talking.put_turns()
                before = time.process_time(), sent.nbytes, talking.read_bytes
                talking.answer(suspended)
                after = time.process_time(), sent.nbytes, talking.read_bytes
                cpu_s, *nbytes = ((b - a) / len(suspended) for a, b in zip(before, after, strict=True))
                measured[number] = min(cpu_s, measured.get(number, (cpu_s,))[0]), *nbytes
            pool.end([entry.id for entry in talking.entries])
    for number in TURNS:
        print("turn {}: {:.2f} ms of CPU, {:.0f} bytes sent, {:,.0f} read".format(
            number, 1e3 * measured[number][0], *measured[number][1:]))  # fmt: skip
    second, *_, last = (measured[number][1:] for number in TURNS)
    assert last == pytest.approx(second, rel=0.02)
    early_s, late_s = (min(measured[number][0] for number in range(first, first + 5)) for first in (2, TURNS[-1] - 4))
    assert late_s < 1.2 * early_s


@contextmanager
def counting_sent() -> Iterator[SimpleNamespace]:
    """Count the bytes that pools send to their processes."""
    total, send = SimpleNamespace(nbytes=0), EnvChild.send

    def counted(self: EnvChild, data: bytes) -> None:
        total.nbytes += len(data)
        send(self, data)

    EnvChild.send = counted  # type: ignore[method-assign]
    try:
        yield total
    finally:
        EnvChild.send = send  # type: ignore[method-assign]
