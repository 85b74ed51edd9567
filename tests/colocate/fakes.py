"""A trainer, an engine and a model that satisfy the interfaces by shape alone: plain Python, no inheritance.

What they compute follows from their weights: the trainer adds one to every weight a step, a log-probability is minus
the first weight, and a generated token is the first weight rounded. So a test sees which weights were used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fusion.inference import InferEngine, Output, Request, RolloutConfig
from fusion.inference.counters import TOTALS
from fusion.model import Buckets, Mesh, ModelConfig, WeightHolder, local_params, plan_units, unit_bytes
from fusion.model.formats import EMBEDDED
from fusion.npu import Device
from fusion.training import Sequences, TrainEngine
from fusion.training.chunk_files import Chunk
from fusion.training.interface import SKIPPED_IN_A_ROW
from fusion.training.loss import Loss
from fusion.training.schedule import Schedule


class FakeModel:
    format = EMBEDDED

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        device: Device,
        dtype: torch.dtype,
        *,
        bucket_bytes: int,
        batch_invariant: bool = False,
        share: Buckets | None = None,
        resident: bool = True,
    ):
        self.config, self.mesh, self.device, self.bucket_bytes = config, mesh, device, bucket_bytes
        self.table = local_params(config, mesh.parallel, mesh.rank, unit_bytes(bucket_bytes) // dtype.itemsize)
        plans = plan_units(self.table, dtype.itemsize, unit_bytes(bucket_bytes))
        self.weights = Buckets(plans, device, dtype, "weights", share, resident)


def first_weight(weights: Buckets) -> float:
    assert weights.resident, "computes with weights that are not in HBM"
    return float(weights.flats[0][0])


class FakeTrainer:
    def __init__(self, *, model: WeightHolder, device: Device, **_: Any):
        self.model, self.steps, self.accumulating, self.schedule = model, 0, False, Schedule(1.0)
        self._gradient = torch.zeros(4, device=device.torch_device)
        self._moment = torch.zeros(4, device=device.torch_device)
        self._weights = model.weights

    def forward_backward(self, sequences: Sequences, loss: Loss, *, continued: bool = False) -> dict[str, float]:
        self.accumulating = True
        self._gradient += sequences.rows
        return {"actor/loss": first_weight(self._weights)}

    def optimizer_step(self, before_update: Callable[[], None] | None = None) -> dict[str, float]:
        if before_update is not None:
            before_update()
        self._moment += self._gradient
        for flat in self.model.weights.flats:
            flat += 1
        self._gradient.zero_()
        self.accumulating, self.steps = False, self.steps + 1
        return {"actor/grad_norm": 1.0, "actor/lr": 1.0, SKIPPED_IN_A_ROW: 0}

    def logprobs(self, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_N = torch.where(sequences.loss_mask, -first_weight(self._weights), 0.0)
        return logprobs_N, torch.zeros_like(logprobs_N)

    def with_own_routing(self, sequences: Sequences) -> Sequences:
        return sequences

    @contextmanager
    def using_weights(self, weights: Buckets) -> Iterator[None]:
        self._weights = weights
        yield
        self._weights = self.model.weights

    def gradients(self) -> dict[str, torch.Tensor]:
        return {"gradient.0": self._gradient}

    def release_gradients(self) -> None:
        self._gradient.untyped_storage().resize_(0)

    def allocate_gradients(self) -> None:
        self._gradient.untyped_storage().resize_(16)
        self._gradient.zero_()

    def optimizer_states(self) -> dict[str, torch.Tensor]:
        return {"exp_avg.0": self._moment}

    def state_dict(self) -> dict[str, Any]:
        weights = {f"weights.{index}": flat for index, flat in enumerate(self.model.weights.flats)}
        return {"tensors": weights | self.optimizer_states(), "steps": self.steps, "skipped_in_a_row": 0}

    def chunks(self, state: dict[str, Any]) -> list[Chunk]:
        weights = [
            Chunk(f"weight/{param.name}", param.shape, (0,) * len(param.shape), self.weight_views(state)[param.name])
            for param in self.model.table
        ]
        return [*weights, Chunk("moment", (4,), (0,), state["tensors"]["exp_avg.0"])]

    def resume_at(self, steps: int, skipped_in_a_row: int) -> None:
        self.steps = steps

    def weight_views(self, state: dict[str, Any]) -> dict[str, torch.Tensor]:
        views: dict[str, torch.Tensor] = {}
        for index, plan in enumerate(self.model.weights.plans):
            views |= plan.views(state["tensors"][f"weights.{index}"])
        return views


class FakeEngine:
    """Every request gets two tokens, one a step."""

    def __init__(self, *, model: WeightHolder, config: RolloutConfig, **_: Any):
        self.on_adopt: Callable[[int], None] = lambda version: None
        self.is_leader, self.num_ranks, self.parked_kv_bytes = True, 1, 0
        self.policy_version, self.paused, self.idle, self.last_step_kind = 0, False, True, ""
        self._model, self._config, self._lock = model, config, threading.Lock()
        self._running: dict[str, Output] = {}
        self._aborted: set[str] = set()
        self._pause = self._has_kv = False
        self._reports: list[dict[str, Any]] = []
        self._generated = 0

    def allocate_kv(self) -> None:
        self._has_kv = True

    def release_kv(self) -> None:
        self._has_kv = False

    def reconfigure(self, config: RolloutConfig) -> None:
        assert not self._has_kv
        self._config = config

    def submit(self, requests: Iterable[Request]) -> None:
        assert self._has_kv
        with self._lock:
            for one in requests:
                self._running[one.id] = Output(one.id, one.group, one.prompt, before=one.response, earlier=one.earlier)

    def abort(self, ids: Iterable[str] | None = None) -> None:
        with self._lock:
            self._aborted |= set(self._running if ids is None else ids)

    def forget(self, ids: Iterable[str]) -> None: ...

    def report(self, items: Iterable[Mapping[str, Any]]) -> None:
        self._reports += map(dict, items)

    def take_reports(self) -> list[dict[str, Any]]:
        reports, self._reports = self._reports, []
        return reports

    def pause(self) -> None:
        self._pause = True

    def adopt(self, version: int) -> None:
        self.on_adopt(version)
        self.policy_version = version

    def status(self) -> dict[str, float]:
        totals = [name for name in TOTALS if not name.startswith("kv_pool_")]
        return dict.fromkeys((*totals, "depth", "tokens_per_s"), 0.0) | {
            "running": len(self._running),
            "generated_tokens": self._generated,
            "policy_version": self.policy_version,
            "kv_tokens": 1 << 10,
        }

    def resume(self) -> None:
        self.paused = self._pause = False

    def step(self) -> list[Output]:
        with self._lock:
            self.paused, self.idle = self._pause, not self._running
            self.last_step_kind = "" if self.idle else "decode"
            ended = []
            for output in list(self._running.values()):
                output.tokens.append(round(first_weight(self._model.weights)))
                output.logprobs.append(-0.5)
                output.versions.append(self.policy_version)
                self._generated += 1
                output.finish_reason = "abort" if output.request_id in self._aborted else "length"
                if len(output.tokens) == 2 or output.finish_reason == "abort":
                    ended.append(self._running.pop(output.request_id))
            return ended

    def suspend(self) -> list[Output]:
        self.idle = True
        left, self._running = list(self._running.values()), {}
        for output in left:
            output.finish_reason = "abort"
        return left


if TYPE_CHECKING:

    def _satisfy_interfaces(
        model: FakeModel, trainer: FakeTrainer, engine: FakeEngine
    ) -> tuple[WeightHolder, TrainEngine, InferEngine]:
        return model, trainer, engine
