"""Store one rank's weights in flat pieces whose memory can be released and reallocated while every view stays valid.

What a piece holds is planned by bucket_plan.py. Parameters that are in no piece (`LocalParam.storage`) keep their
memory in every phase: small vectors in float32 on the card, and on the host what no forward pass needs. Invariants:
`release` frees every byte of the pieces; the padding of a parameter (`LocalParam.holes`) is zero while it has memory.
"""

from collections.abc import Iterator, Sequence
from copy import copy

import torch

from fusion.model.bucket_plan import BucketPlan
from fusion.model.local_param import LocalParam
from fusion.npu import Device


class Buckets:
    """Hold flat storage for every parameter of a plan: weights in units, or gradients in buckets. ``share``: pieces of
    equal content (same slices in the same places) and dtype use its storage, which only ``share`` allocates and
    releases; `shared` maps their indices. ``resident``: False: hold no memory after construction, which allocates and
    frees one piece after the other. ``apart``: parameters that are in no piece. ``share`` has their values on the card,
    too."""

    def __init__(
        self,
        plans: tuple[BucketPlan, ...],
        device: Device,
        dtype: torch.dtype,
        owner: str,
        share: "Buckets | None" = None,
        resident: bool = True,
        apart: Sequence[LocalParam] = (),
    ):
        self.plans, self.dtype, self.owner, self._device = plans, dtype, owner, device
        shareable = {plan.content: i for i, plan in enumerate(share.plans)} if share and share.dtype == dtype else {}
        self.shared = {i: shareable[plan.content] for i, plan in enumerate(plans) if plan.content in shareable}
        """Index of a shared piece → its index in ``share``."""
        self.flats: list[torch.Tensor] = []
        self.views: dict[str, torch.Tensor] = {}
        self.stacks: dict[str, list[torch.Tensor]] = {}
        """Name of a stack → views [n, …] of all its matrices in order: one where a unit holds it"""
        self._holes: dict[int, list[torch.Tensor]] = {}
        with device.owner(owner):
            for i, plan in enumerate(plans):
                if share is not None and i in self.shared:
                    self.flats.append(share.flats[self.shared[i]])
                    self._holes[i] = share._holes[self.shared[i]]
                    theirs = share.plans[self.shared[i]].entries
                    names = zip(plan.entries, theirs, strict=True)
                    self.views |= {param.name: share.views[other.name] for (param, _), (other, _) in names}
                    self._view_stacks(i)
                    continue
                flat = torch.zeros(plan.numel, dtype=dtype, device=device.torch_device)
                self.flats.append(flat)
                self.views |= plan.views(flat)
                self._holes[i] = plan.holes(flat)
                self._view_stacks(i)
                if not resident:
                    flat.untyped_storage().resize_(0)
        self._storages = [flat.untyped_storage() for flat in self.flats]
        self.apart = tuple(apart)
        self.card = self._card_values(share)
        """float32 on the card: the values of the parameters ``apart`` that lie there, in order"""
        self.views |= views_apart(self.apart, self.card)
        for param in self.apart:
            if param.storage == "host":
                self.views[param.name] = torch.zeros(param.shape, dtype=torch.float32 if param.float32 else dtype)

    def _view_stacks(self, index: int) -> None:
        plan, flat = self.plans[index], self.flats[index]
        for stack in plan.stacks:
            self.stacks.setdefault(stack, []).extend(plan.runs(stack, flat))

    def __iter__(self) -> Iterator[tuple[BucketPlan, torch.Tensor]]:
        return zip(self.plans, self.flats, strict=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces, shared ones included, resident or not."""
        return sum(plan.numel for plan in self.plans) * self.dtype.itemsize

    @property
    def resident(self) -> bool:
        return all(self.held(index) > 0 for index in range(len(self.flats)))

    def addresses(self) -> list[int]:
        """Return where each piece lies now; 0 after `release`."""
        return [storage.data_ptr() for storage in self._storages]

    def held(self, index: int) -> int:
        """Return the bytes that a piece holds now; 0 after `release`."""
        return self._storages[index].nbytes()

    def trained(self) -> "Buckets":
        """Return the pieces of what is trained alone, without values apart from pieces; over the same memory."""
        kept = [index for index, plan in enumerate(self.plans) if not plan.frozen]
        if len(kept) == len(self.plans):
            return self
        trained = copy(self)
        trained.plans, trained.flats = tuple(self.plans[index] for index in kept), [self.flats[index] for index in kept]
        trained._storages = [self._storages[index] for index in kept]
        trained.shared = {at: self.shared[index] for at, index in enumerate(kept) if index in self.shared}
        trained._holes = {at: self._holes[index] for at, index in enumerate(kept)}
        trained.apart, trained.card = (), self.card[:0]
        return trained

    def allocate(self, index: int | Sequence[int] | None = None) -> None:
        """Allocate memory for all of this object's own pieces, or for some. Newly allocated content is undefined,
        but for padding."""
        with self._device.owner(self.owner):
            for i in self._own(index):
                storage = self._storages[i]
                if storage.nbytes() == 0:
                    storage.resize_(self.plans[i].numel * self.dtype.itemsize)
                    for hole in self._holes[i]:
                        hole.zero_()

    def release(self, index: int | Sequence[int] | None = None) -> None:
        """Release the device memory of all of this object's own pieces, or of some; views stay valid, their content is
        lost."""
        for i in self._own(index):
            self._storages[i].resize_(0)

    def _card_values(self, share: "Buckets | None") -> torch.Tensor:
        numel = sum(param.numel for param in self.apart if param.storage == "card")
        if share is not None and share.card.numel():
            assert share.card.numel() == numel
            return share.card
        with self._device.owner(self.owner):
            return torch.zeros(numel, dtype=torch.float32, device=self._device.torch_device)

    def _own(self, index: int | Sequence[int] | None) -> Sequence[int]:
        if index is None:
            return [i for i in range(len(self.flats)) if i not in self.shared]
        return [index] if isinstance(index, int) else index


def views_apart(apart: Sequence[LocalParam], card: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return views of the parameters ``apart`` on the card, by name, in a tensor of their values."""
    params = [param for param in apart if param.storage == "card"]
    assert all(param.float32 for param in params)
    pieces = card.split([param.numel for param in params]) if params else ()
    return {param.name: piece.view(param.shape) for param, piece in zip(params, pieces, strict=True)}
