"""The weights of a card: the two layouts of the policy, one in memory at a time, and the reference on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fusion.colocate.spec import WorkerSpec
from fusion.ep_switch import Layout, Plan, SwitchReport, execute, plan_switch, weights_checksum
from fusion.model import Buckets, Mesh, ModelConfig, Transformer, load_weights
from fusion.npu import Device
from fusion.offload import HostPool, Offloader


class WeightsDiffer(RuntimeError):
    """Trainer and engine do not hold the same weights after a switch."""


class PolicyWeights:
    """The policy as two models over the same weights, one in each layout; `to_infer` and `to_train` move them.

    Invariant: outside a switch exactly one of the two models has memory.
    """

    def __init__(self, spec: WorkerSpec, config: ModelConfig, rank: int, device: Device):
        self.spec, self.config, self.device = spec, config, device
        bucket_bytes, dtype = spec.fusion.bucket_bytes, spec.model.torch_dtype
        self.train_mesh = Mesh.create(spec.train)
        self.train = Transformer(config, self.train_mesh, device, dtype, bucket_bytes=bucket_bytes)
        load_weights(self.train, spec.model.path)
        self.engine_mesh = self._engine_mesh(rank)
        self.infer = Transformer(
            config,
            self.engine_mesh,
            device,
            dtype,
            bucket_bytes=bucket_bytes,
            batch_invariant=spec.rollout.batch_invariant,
        )
        self.infer.weights.release()
        self.infer.requires_grad_(False)
        ranks = tuple(range(spec.world))
        source = Layout(config, spec.train, ranks, dtype, bucket_bytes)
        target = Layout(config, spec.infer_of_one_engine, ranks, dtype, bucket_bytes)
        self._to_infer = plan_switch(source, target, bucket_bytes)
        self._to_train = plan_switch(target, source, bucket_bytes)

    def to_infer(self) -> SwitchReport:
        return self._switch(self._to_infer, self.train, self.infer)

    def to_train(self) -> SwitchReport:
        return self._switch(self._to_train, self.infer, self.train)

    def _engine_mesh(self, rank: int) -> Mesh:
        size = self.spec.engine_size
        shape = self.spec.infer_of_one_engine
        meshes = [Mesh.create(shape, ranks) for ranks in self.spec.engines]
        return meshes[rank // size]

    def _switch(self, plan: Plan, source: Transformer, target: Transformer) -> SwitchReport:
        checksum = self.spec.fusion.checksum
        before = weights_checksum(source) if checksum else None
        group = dist.group.WORLD if self.spec.world > 1 else None
        report = execute(plan, source, target, self.device, group, checksum=checksum)
        if checksum and (after := weights_checksum(target)) != before:
            raise WeightsDiffer(f"weights sum to {after:#x} after the switch, to {before:#x} before it")
        return report


class ReferenceWeights:
    """The weights the run started from, on the host in the training layout; in HBM only inside `in_place`."""

    def __init__(self, model: Transformer, device: Device):
        self.model = model
        self.buckets = Buckets(model.weights.plans, device, model.weights.dtype, owner="weights")
        for (_, copy), (_, flat) in zip(self.buckets, model.weights, strict=True):
            copy.copy_(flat)
        self.offloader = Offloader(device, HostPool(device))
        self.names = [f"reference.{index}" for index in range(len(self.buckets.flats))]
        self._leave()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with the reference's weights; the policy's stay in HBM untouched."""
        self.offloader.back(self.names)
        own = {name: parameter.data for name, parameter in self.model.named_parameters()}
        try:
            for name, parameter in self.model.named_parameters():
                parameter.data = self.buckets.views[name]
            yield
        finally:
            for name, parameter in self.model.named_parameters():
                parameter.data = own[name]
            self._leave()

    def _leave(self) -> None:
        self.offloader.out(dict(zip(self.names, self.buckets.flats, strict=True)))
