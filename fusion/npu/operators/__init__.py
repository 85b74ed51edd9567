"""Choose the operators of a card: one table for each kind, with the same methods.

    plain.py     composed of PyTorch's operators, with gradients: the interface, and the reference of the others;
                   plain_attention.py: its attention, composed in composed_attention.py
    cuda.py      PyTorch's fused operators, on CUDA cards; cuda_fused.py: in generation
                   with the kernels of triton_attention.py and triton_experts.py
    cpu.py       one C++ operator for each, in generation: the plain CPU and emulated cards
    ascend.py    `torch.ops.npu`: Ascend cards; ascend_attention.py: its attention;
                   ascend_functions.py: with the gradients that torch_npu lacks
    limits.py    the documented limits of vendors' operators, with their sources
    gating.py, rows.py    pure functions that all tables share; gating_spec.py: what a router states

Every module of the model, the KV cache and the optimizer call the table of their device, `Device.operators`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
