"""Evaluate prompts that are not trained: before the first step, every `eval.every` steps, and after the last step.

    eval.files, held-out rows ─► files: prompts, and each file's reward
                                   │ every prompt is answered `eval.samples` times
                                   ▼
    engines ─ answers ─► rewards ─► estimates: mean reward, pass@k, length; intervals over prompts
                                   │
                                   ├─► metrics of the step, as verl names them
                                   └─► history: evaluations.jsonl, and which checkpoint is the best by `eval.best`

`evaluation` acts; `estimates`, `results` and `history` are pure. `standalone` evaluates a checkpoint alone."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
