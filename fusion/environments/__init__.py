"""Run environments, with which the model speaks in several turns, in guarded processes.

    Task(prompt, answer, fields), seed
         │                                    controller's process
    EnvPool.begin ── one frame per order ──────────────────────────────────────
         ▲                │                   guarded children (no torch in them), an event loop each
         │                ▼
         │     Environment.reset ─► messages    a step that raises, takes too long, exceeds the memory, returns
         │     Environment.step  ─► Turn        something else or ends its process fails its own conversation
         │                │
    Stepped(turn | failure, digest) ◄┘ ── Bridge: token ids of the messages, behind the tokens that were sampled

A conversation is the list of the model's turns and of the digests of what it was told: whoever has both can continue it
in a fresh environment with the same seed, which must say the same again."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
