"""The engine: continuous batching over a paged KV cache, on one card or one TP/EP group.

    config      RolloutConfig: the config group `rollout`
    request     Request, SamplingParams, Output: plain data, in and out
    interface   InferEngine: what other rooms may ask of an engine
    control     orders from any thread, passed on to all ranks at one step
    sequence    a request in the engine; what one step computes                              (pure)
    scheduler   which tokens the next step computes; which attention rank gets a request     (pure)
    blocks      who holds which KV block; the prefix cache, keyed by policy version          (pure)
    kv_cache    the memory of keys and values, allocated last, released before training
    parked      KV of suspended requests on the host, until they are resumed
    routing     which experts the tokens in it went to
    batch       one step as tensors: ids, positions, slots, (row, block) pairs
    attention   paged attention over them: the model's `attend`
    noise       one uniform number per (run seed, request, position)
    sampler     temperature, top-k, top-p, min-p, and the token under that number
    drawing     the next tokens of a step, the same on all ranks
    forward     one step through this rank's layers
    engine      EmbeddedEngine, the `InferEngine` of this house; all ranks of the group step together

Extension points: a decode that verifies a draft is a chunk whose rows are all sampled; KV that is moved is named
by its blocks (`blocks`), whose names are the same in every process.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
