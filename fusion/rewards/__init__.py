"""Score responses with verifiable rewards in guarded processes, whose failures never reach the controller.

    RewardSample(prompt, response, answer, fields)
         │                                         controller's process
    RewardPool.score ──── one frame per sample ────────────────────────────────────────
         ▲                     │                   guarded children (no torch in them)
         │                     ▼
         │      arithmetic   exact match             a sample that raises, exceeds `reward.time_limit_s`
         │      math         math-verify             or `reward.memory_mib`, returns no number or kills
         │      user         file.py:function        its process fails alone; what it started is killed
         │      format       a regular expression
         │                     │
    RewardOutcome(reward | None, error | None, …) ◄┘ ── terms: the weighted sum of several

`reward is None` means "not scored": `reward_metrics` counts it, each distinct error is logged once, and it is never
replaced by 0."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
