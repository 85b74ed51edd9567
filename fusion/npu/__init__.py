"""Provide one interface to Ascend cards, CUDA cards and the NPU emulated on the CPU.

    open_device(kind) ──┬─ npu ──────► torch_npu  ─┐
                        ├─ cuda ─────► torch.cuda ─┼─ accelerator.py   owners by weak references (owners.py)
                        ├─ emulated ─► emulator/ ──┘                   owners by the allocator itself
                        └─ no compiler ► ledger.py                     plain CPU tensors, bytes counted
                                 │
                             Device: torch_device, process_group_backend, memory(), owner("weights"), host_empty(),
                                     share() and map() between processes, streams and events, describe()

pacer.py makes the steps of an emulated card last as long as on the card that it models.

No other package depends on the kind of device. Importing this package builds and initialises nothing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
