"""The card: a Megatron-style MoE trainer and an inference engine that share one NPU.

npu           the device: Ascend, CUDA or the emulated NPU behind one face
model         the architecture, its parameter table, Hugging Face folders in any layout
training      forward, backward, sharded optimizer, algorithms
inference     paged KV cache, continuous batching, sampling
ep_switch     layouts, reshard plans and their transfer
offload       training state out of HBM and back
rollout       many engines behind one request buffer
rewards       verifiable rewards in guarded processes
environments  conversations of several turns, with tools
colocate      the worker that hosts all of it, and its phases
telemetry     metrics, timeline, memory ledger, progress
resources     where recipes and scripts are, in the checkout or installed
"""
