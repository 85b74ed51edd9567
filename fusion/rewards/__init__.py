"""Verifiable rewards, scored outside the controller in processes that may fail.

    RewardSample(prompt, response, answer, fields)
         │                                         controller's process
    RewardPool.score ──── one frame per sample ────────────────────────────────────────
         ▲                     │                   guarded children (no torch in them)
         │                     ▼
         │      arithmetic   exact match             a sample that raises, hangs past
         │      math         math-verify             `reward.time_limit_s`, returns no number or
         │      user         file.py:function        kills its process costs itself only
         │                     │
    RewardOutcome(reward | None, error | None, …) ◄┘

`reward is None` means "not scored": it is counted by `reward_metrics`, shown once per distinct error, and never becomes
0.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
