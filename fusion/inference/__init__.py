"""Generate responses: an engine with continuous batching over a paged KV cache, on one card or one TP/EP group.

    config      RolloutConfig: the config group `rollout`
    request     Request, SamplingParams, Output: plain data, in and out
    request_columns   requests as columns, as they are sent                          (pure)
    interface   InferEngine: the interface of an engine as used by the other packages
    control     control calls from any thread, applied on all ranks at the same step
    sequence    a request in the engine; what one step computes                              (pure)
    verification  the rows of a draft, and which of its tokens are kept                      (pure)
    waiting     the order in which waiting requests are admitted                             (pure)
    scheduler   selects the tokens of the next step; assigns requests to attention ranks     (pure)
    blocks      manages KV blocks; the prefix cache, keyed by policy version                 (pure)
    kv_layout   what a token keeps in the KV cache: keys and values of each head, or a latent (pure)
    context     the part of each sequence that is on one of several ranks, and how attention is merged
    kv_cache    memory of keys and values or latents, allocated last, released before training
    parked      KV of suspended requests on the host, until they are resumed
    routing     the experts that the tokens in the KV cache were routed to
    batch       one step as tensors: ids, positions, slots, rows of blocks
    attention   paged attention over them: the model's `attend`
    noise       one uniform number per (run seed, request, position)
    sampler     temperature, top-k, top-p, min-p, and the choice of a token by that number
    forward     runs one step through this rank's layers and samples the next tokens, the same on all ranks
    counters    totals of a rank, exchanged at every step and reported as metrics            (pure)
    controlled  what every engine does: orders of a step, control calls, size of the KV cache
    engine      EmbeddedEngine, the embedded `InferEngine`; all ranks of the group step together
    backends    vLLM as an `InferEngine`

Extension point: KV that is moved is named by its blocks (`blocks`), whose names are the same in every process."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
