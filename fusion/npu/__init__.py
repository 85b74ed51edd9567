"""The device layer: one face for Ascend cards, CUDA cards and the NPU emulated on the CPU.

    open_device(kind) ──┬─ npu ──────► torch_npu  ─┐
                        ├─ cuda ─────► torch.cuda ─┼─ accelerator.py   owners by weak references (owners.py)
                        ├─ emulated ─► emulator/ ──┘                   owners by the allocator itself
                        └─ no compiler ► ledger.py                     plain CPU tensors, counted
                                 │
                             Device: torch_device, process_group_backend, memory(), owner("weights"), host_empty(),
                                     share() and map() between processes, streams and events, describe()

pacer.py makes an emulated card take as long for its steps as the card it stands for.

No other room asks which device it is. Nothing is built or initialised by importing this package.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
