"""Check the calls of `fusion/npu/operators/ascend*.py` against torch_npu's schemas and Meta kernels, without a card.

wheel.py downloads a wheel of torch_npu and reads two files of it; check.py, a process of its own, registers these
behind a stub and makes the calls on `meta` tensors with shapes of every family (shapes.py).
"""
