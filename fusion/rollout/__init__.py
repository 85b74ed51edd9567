"""Many engines as one: which request runs where, and what becomes of its tokens.

    buffer            the requests of all groups in flight, and which engine holds which       ┐
    dispatch          assigns requests to engines                                              │
    orders/           which waiting request is next, and which engine prefers it               │ pure
    types             what an engine's stage reports: suspended samples, answers               ┘
    engine_stage      runs one engine for a stage: steps, control calls, outputs to the queue
    partial_samples   suspended samples, kept in the queue until an engine resumes them
    packing           outputs as rows of the queue
    drafts/           what a response probably continues with, from others to the same prompt
    detokenize        responses as text, on the card that has their tokens

    buffer ─ dispatch ─► Request ─► engine_stage ─┬─ finished ──► packing ─────────► queue
       ▲                                          └─ suspended ─► partial_samples ─► queue
       └───────────── SuspendedSample ◄───────────────────────────────┘

This package exports only what is pure; the rest is imported by module, so that a policy that uses the buffer loads
no torch. An engine is one TP/EP group."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
