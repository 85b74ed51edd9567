"""Workers of one deployment, each a rank of `tests.helpers.run_ranks`, driven through a step as the controller does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from distqueue import LocalQueue, PackedBatch
from fusion.colocate import FusionConfig, InferenceShare, RewardModelSpec, StageReport, Worker, WorkerSpec, deploy
from fusion.ep_switch import weights_checksum
from fusion.inference import Request
from fusion.model import Mesh, Parallel
from fusion.model.options import PolicyModelConfig
from fusion.npu import DeviceConfig
from fusion.telemetry import Span
from fusion.training import AlgorithmConfig, TrainingConfig, split_over_ranks
from tests.helpers import TINY, TINY_EXPERTS
from tests.rollouts import rollout_config

GROUPS, GROUP = 4, 2


def make_spec(
    path: str,
    npus: int,
    train: dict[str, int],
    infer: dict[str, int],
    reward_model: str | None = None,
    **fusion: Any,
) -> WorkerSpec:
    """A tiny run: KL to a reference, checksums at every switch, float32."""
    config = FusionConfig(bucket_bytes=1 << 14, checksum=True, **fusion)
    deployment = deploy(config, npus, reference=True, reward_model=reward_model is not None)
    scoring = Parallel(len(deployment.reward_model or deployment.reference))
    return WorkerSpec(
        seed=5,
        steps=10,
        model=PolicyModelConfig(path=path),
        deployment=deployment,
        train=Parallel(len(deployment.train), **train),
        infer=Parallel(len(deployment.generate), **infer),
        fusion=config,
        rollout=rollout_config(max_response_length=6, max_length=64, max_kv_tokens=1024),
        training=TrainingConfig(lr=1e-2),
        algorithm=AlgorithmConfig(kl_coef=0.1, group_size=GROUP),
        device=DeviceConfig("emulated"),
        reference=scoring if config.score_cards else None,
        reward_model=RewardModelSpec(reward_model, scoring) if reward_model else None,
    )


def tiny_reward_model(folder: Any, experts: bool = False, **changes: Any) -> str:
    """A `Qwen3ForSequenceClassification` folder (or its MoE sibling) of a few thousand parameters."""
    from transformers import (
        Qwen3Config,
        Qwen3ForSequenceClassification,
        Qwen3MoeConfig,
        Qwen3MoeForSequenceClassification,
    )

    torch.manual_seed(11)
    shape = TINY | {"num_labels": 1, "hidden_size": 16} | changes
    if experts:
        Qwen3MoeForSequenceClassification(Qwen3MoeConfig(**(shape | TINY_EXPERTS))).save_pretrained(folder)
    else:
        Qwen3ForSequenceClassification(Qwen3Config(**shape)).save_pretrained(folder)
    return str(folder)


class Mirror(LocalQueue):
    """A queue in every rank that holds what all ranks have put, once they have met in `meet`."""

    def __init__(self) -> None:
        super().__init__(["train"])
        self._new: list[PackedBatch] = []

    def put(self, batch: PackedBatch, *_: Any) -> None:  # type: ignore[override]
        self._new.append(batch)

    @property
    def put_here(self) -> list[PackedBatch]:
        """What this rank has put since the last meeting."""
        return list(self._new)

    def meet(self) -> None:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self._new)
        for batches in everyone:
            for batch in batches:
                super().put(batch)
        self._new = []


class Card:
    """One rank: its worker, and what it sees of the run."""

    def __init__(self, rank: int, device: Any, spec: WorkerSpec):
        self.spec, self.rank, self.deployment = spec, rank, spec.deployment
        self.worker = Worker(spec, rank, Mirror())
        self.worker.prepare("", device)
        self.spans: list[Span] = []
        """Of all stages so far"""

    def step(self, version: int, share: InferenceShare | None = None) -> dict[str, Any]:
        """Generate, score, reference, train; what is returned is the same on every rank but for `memory`."""
        worker, deployment, memory = self.worker, self.deployment, {}
        engines = [self.spec.engines[i] for i in (share.engines if share else range(len(self.spec.engines)))]
        if self.rank in deployment.actor:
            self.told(worker.switch("infer", version, share))
            memory["infer"] = worker.card.device.memory_by_owner()
        mine = [engine for engine in engines if self.rank in engine]
        if mine:
            requests = self.requests(version, engines.index(mine[0]), len(engines))
            self.told(worker.generate(requests if self.rank == mine[0][0] else [], stay=False))
        self.meet()
        ids = [f"{version}-{g}/{k}" for g in range(GROUPS) for k in range(GROUP)]
        if self.rank in deployment.train:
            self.told(worker.switch("train", version))
            memory["switched"] = worker.card.device.memory_by_owner()
        scores = {}
        if self.rank in deployment.reward_model:
            scores = self.told(worker.score(self.own(ids, worker.card.meshes.reward_model))).scores
        if self.rank in deployment.reference:
            meshes = worker.card.meshes
            report = self.told(worker.reference(self.own(ids, meshes.reference or meshes.train)))
            memory["reference"] = report.memory.by_owner["reference"]
        self.meet()
        samples = worker.queue.read(ids, ["response", "behaviour_logprobs", "ref_logprobs"])
        columns = {"advantage": torch.linspace(-1, 1, len(ids))}
        columns |= {"share": torch.ones(len(ids))} if self.spec.turns else {}
        LocalQueue.put(worker.queue, PackedBatch.from_samples(ids, columns))
        if self.rank in deployment.train:
            memory["train"] = self.told(worker.train([self.own(ids)])).memory.by_owner["train"]
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, {id: outcome.reward for id, outcome in scores.items()})
        return {
            "tokens": samples["response"].buffer.tolist(),
            "logprobs": samples["behaviour_logprobs"].buffer.tolist(),
            "reference": samples["ref_logprobs"].buffer.tolist(),
            "scores": {id: score for one in found for id, score in one.items()},
            "memory": memory,
            "weights": self.checksum(),
        }

    def requests(self, version: int, number: int, engines: int) -> list[Request]:
        """This engine's part of the groups."""
        params = self.spec.rollout.sampling_params()
        return [
            Request(f"{version}-{g}/{k}", (3 + g, 4, 5), params, group=f"{version}-{g}")
            for g in range(number, GROUPS, engines)
            for k in range(GROUP)
        ]

    def own(self, ids: list[str], mesh: Mesh | None = None) -> list[str]:
        """What this card's replica of the mesh (default: of those that train) gets of some samples."""
        mesh = mesh or self.worker.card.meshes.train
        assert mesh is not None
        replica = mesh.parallel.coordinate("replica", mesh.rank)
        return [ids[index] for index in split_over_ranks([9] * len(ids), mesh.parallel.replicas)[replica]]

    def checksum(self) -> int | None:
        """Of the policy as it is trained, on the cards that train."""
        weights = self.worker.card.weights.train
        return weights_checksum(weights) if weights is not None and weights.weights.resident else None

    def told(self, report: StageReport) -> StageReport:
        self.spans += report.spans
        return report

    def meet(self) -> None:
        self.worker.queue.meet()
