"""Score responses with verifiable rewards in guarded processes, whose failures never reach the controller.

    RewardSample(prompt, response, answer, fields)
         │                                         controller's process
    RewardPool.score ──── one frame per sample ────────────────────────────────────────
         ▲                     │                   guarded children (no torch in them)
         │                     ▼
         │      arithmetic   exact match             a sample that raises, hangs past
         │      math         math-verify             `reward.time_limit_s`, returns no number or
         │      user         file.py:function        kills its process fails alone
         │                     │
    RewardOutcome(reward | None, error | None, …) ◄┘

`reward is None` means "not scored": `reward_metrics` counts it, each distinct error is logged once, and it is never
replaced by 0.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
