"""Define what every engine does with its control channel, whatever computes its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fusion.inference.control import ControlChannel
from fusion.inference.counters import Counters
from fusion.inference.request import Output, Request
from fusion.inference.validation import check_distinct, check_fits, checked_requests
from fusion.model import Mesh, WeightHolder


class ControlledEngine:
    """Send control calls from any thread of the leader, and report the metrics of all ranks. `InferEngine` specifies
    the methods; a subclass defines `step` and `policy_version`.

    Attributes:
        max_length: of prompt and response in total.
        capacity_tokens: capacity of an attention rank's KV cache in tokens, at the last allocation.
        shares_kv: whether its KV is in the machine's pool, too.
    """

    model: WeightHolder
    max_length: int

    def __init__(self, mesh: Mesh):
        self.mesh, self.control = mesh, ControlChannel(mesh)
        self.counters = Counters()
        self.capacity_tokens = 0
        self.shares_kv = False
        self.paused = False
        self._idle = True
        self._busy_s = 0.0

    @property
    def is_leader(self) -> bool:
        return self.mesh.rank == 0

    @property
    def num_ranks(self) -> int:
        return self.mesh.parallel.world

    @property
    def policy_version(self) -> int:
        raise NotImplementedError

    def submit(self, requests: Iterable[Request]) -> None:
        assert self.is_leader, "requests go to rank 0 of the engine"
        assert self.capacity_tokens, "allocate_kv comes before the first submit"
        requests = checked_requests(requests, self.model.config.vocab_size)
        check_distinct(requests)
        for request in requests:
            check_fits(request, self.max_length, self.capacity_tokens)
        self.control.inbox.submit(requests)

    def abort(self, ids: Iterable[str] | None = None) -> None:
        assert self.is_leader, "aborts go to rank 0 of the engine"
        self.control.inbox.abort(ids)

    def report(self, items: Iterable[Mapping[str, Any]]) -> None:
        self.control.inbox.report(items)

    def take_reports(self) -> list[dict[str, Any]]:
        assert self.is_leader, "reports arrive on rank 0 of the engine"
        return self.control.inbox.take_reports()

    def forget(self, ids: Iterable[str]) -> None:
        """Free parked KV, if there is any, before the requests of later `submit` calls are placed."""
        assert self.is_leader, "parked KV is freed by rank 0 of the engine"
        self.control.inbox.forget(ids)

    def pause(self) -> None:
        assert self.is_leader, "pauses go to rank 0 of the engine"
        self.control.inbox.pause()

    def adopt(self, version: int) -> None:
        assert self.is_leader, "new weights are announced to rank 0 of the engine"
        self.control.inbox.adopt(version)

    def resume(self) -> None:
        self.paused = False

    def status(self) -> dict[str, float]:
        states = self.control.states
        totals = states.totals()
        return {
            "depth": states.waiting + len(self.control.inbox),
            "running": states.running,
            **{name: total for name, total in totals.items() if self.shares_kv or not name.startswith("kv_pool_")},
            "tokens_per_s": totals["generated_tokens"] / self._busy_s if self._busy_s else 0.0,
            "policy_version": self.policy_version,
            "kv_tokens": self.capacity_tokens,
        }

    @property
    def idle(self) -> bool:
        return self._idle

    def step(self) -> list[Output]:
        raise NotImplementedError

    def run(self) -> list[Output]:
        """Step until the engine is idle; return all outputs. Collective."""
        outputs = self.step()
        while not self._idle:
            outputs += self.step()
        return outputs
