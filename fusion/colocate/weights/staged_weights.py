"""Receive new weights on a card while its engine decodes with the old ones.

    weights thread   ── receive v+1 into staging ─────┐ all cards of the engine have received it
    engine's thread  decode v  decode v  decode v  …  └─► adopt ─► decode v+1 …
                                                         pause: one copy into the model, between two steps

The staged weights are in pinned host memory that is allocated once and kept or, with ``fusion.double_buffer``, in HBM,
where they are allocated before the KV cache and reduce its size.

Invariants: the model's weights change only in `adopt`, all at once; a version is adopted at most once, and only if it
is newer than the model's; with checksums enabled, the model then has the checksum of the trainer's weights."""

import time
from collections.abc import Sequence

import torch

from fusion.colocate.weights.policy import PolicyWeights, WeightsDiffer
from fusion.colocate.weights.route import Route
from fusion.ep_switch import SwitchReport, weights_checksum
from fusion.model.bucket_plan import BucketPlan
from fusion.model.local_param import LocalParam
from fusion.model.weights import Buckets, views_apart
from fusion.npu import Device
from fusion.offload import HostPool


class HostBuckets(Buckets):
    """`Buckets` in pinned host memory that is never freed: `allocate` and `release` only mark units as held or not."""

    def __init__(
        self, plans: tuple[BucketPlan, ...], pool: HostPool, dtype: torch.dtype, apart: tuple[LocalParam, ...] = ()
    ):
        self.plans, self.dtype, self.owner, self.shared = plans, dtype, "host", {}
        regions = pool.take([plan.numel * dtype.itemsize for plan in plans])
        self.flats = [region.view(dtype) for region in regions]
        self.views = {}
        for plan, flat in zip(plans, self.flats, strict=True):
            self.views |= plan.views(flat)
            for hole in plan.holes(flat):
                hole.zero_()
        self.apart, self.card = apart, torch.zeros(sum(param.numel for param in apart))
        self.views |= views_apart(apart, self.card)
        self._held: set[int] = set()

    def held(self, index: int) -> int:
        return self.plans[index].numel * self.dtype.itemsize if index in self._held else 0

    def allocate(self, index: int | Sequence[int] | None = None) -> None:
        self._held.update(self._own(index))

    def release(self, index: int | Sequence[int] | None = None) -> None:
        self._held.difference_update(self._own(index))


class StagedWeights:
    """Stages new weights for the model ``weights.infer``; replaces `PolicyWeights` in a switch in the background."""

    def __init__(self, weights: PolicyWeights, device: Device, pool: HostPool, *, in_hbm: bool):
        assert weights.infer is not None and weights.train is None, (
            "only cards that only generate receive weights while they decode"
        )
        self._weights, self._device, self._model, self._pool = weights, device, weights.infer, pool
        self._in_hbm = in_hbm
        self._buckets: Buckets | None = None
        self._checksum: int | None = None
        self._version = -1
        self.pause_s = 0.0
        """Duration of the last `adopt`"""

    def reserve(self) -> None:
        """Allocate staging memory in HBM, before the KV cache takes the free memory."""
        if self._in_hbm:
            self._storage.allocate()

    def route(self, engines: Sequence[int]) -> Route:
        return self._weights.route(engines)

    def to_infer(self, route: Route, while_generating: bool) -> SwitchReport:
        """Receive the policy's weights into staging. Collective as `PolicyWeights.to_infer`; on a separate thread."""
        self._storage.release()
        self._weights.check_base()
        group = self._weights.meshes.actor
        report, self._checksum = self._weights.reshard(
            route.to_infer, source=None, target=self._storage, group=group, while_generating=while_generating
        )
        return report

    def to_train(self, *_: object) -> None:
        raise AssertionError("a card that only generates has no weights to return")

    def expect(self, version: int) -> None:
        """Declare that the next switch receives policy ``version``."""
        self._version = version

    def adopt(self, version: int) -> None:
        """Copy policy ``version`` into the model. Between two steps; collective over the engine.
        Raise WeightsDiffer: the model's checksum is not that of the trainer's weights."""
        assert version == self._version, f"cannot adopt policy {version}: policy {self._version} is staged"
        began = time.perf_counter()
        moved = self._weights.moved(self._model)
        for current, staged in zip(moved.flats, self._storage.flats, strict=True):
            current.copy_(staged, non_blocking=True)
        moved.card.copy_(self._storage.card)
        self._device.current_stream().synchronize()
        self.pause_s = time.perf_counter() - began
        if self._checksum is not None and (adopted := weights_checksum(self._model)) != self._checksum:
            raise WeightsDiffer(
                f"policy {version} has checksum {self._checksum}, the weights that the engine adopted have {adopted}"
            )

    @property
    def _storage(self) -> Buckets:
        if self._buckets is None:
            weights = self._weights.moved(self._model)
            plans, dtype, apart = weights.plans, weights.dtype, weights.apart
            if self._in_hbm:
                self._buckets = Buckets(plans, self._device, dtype, owner="weights", resident=False, apart=apart)
            else:
                self._buckets = HostBuckets(plans, self._pool, dtype, apart)
        return self._buckets
