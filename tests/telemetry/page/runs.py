"""Run folders for the tests of the page."""

import random
from pathlib import Path

from fusion.telemetry import MemoryLedger, RunFolder, Span

HOSTILE = "</script><script>window.hostile=1</script><img src=x onerror=window.hostile=1><!--\u2028"


def leave_a_run(root: Path, name: str = "run", *, steps: int = 20, cards: int = 2, text: str = "", lr: float = 0.5):
    """A finished run whose metrics, groups and samples follow from the step; ``text`` is part of every free text."""
    ledger = MemoryLedger()
    ledger.record("infer", {"kv": 2**21}, 2**22, capacity=2**23)
    ledger.record("train", {"weights": 2**20, "optimizer": 2**21}, 2**22, capacity=2**23)
    with RunFolder(root, name) as run:
        run.write_config(
            {
                "run": {"name": name + text, "steps": steps},
                "rollout": {"max_response_length": 64},
                "training": {"lr": lr},
                "stalesync": {"max_staleness": 1},
            }
        )
        for step in range(1, steps + 1):
            timing = {"timing_s/gen": 1.0, "timing_s/gen_tail": 0.25, "timing_s/step": 4.5}
            more = {"val/rewards/before": 0.25} if step == 1 else {"val/rewards/after": 0.75} if step == steps else {}
            run.log(step, {"critic/rewards/mean": step / steps, "x" + text: 1.0, **timing, **more, **ledger.metrics()})
            samples = [
                {"prompt": f"{i}+1={text}", "response": f"{step}{text}", "reward": i / 4, "answer": f"{i + 1}{text}"}
                for i in range(4)
            ]
            run.log_samples(step, samples)
            tokens = {"prompt_tokens": [4, 4], "response_tokens": [[step, 10], [40, 60]]}
            run.log_groups(step, ["a", "b"], "trained" + text, lag=step % 2, tokens=tokens)
        for card in range(cards):
            run.log_spans(activities(f"card {card}{text}", steps))
    return run.path


def leave_long_samples(root: Path, num_words: int = 131_072) -> Path:
    """A run of one step whose prompts and responses are whole, and have so many words."""
    text = f"first {'word ' * num_words}last"
    with RunFolder(root, "run", samples_per_step=16) as run:
        run.write_config({"run": {"steps": 1}})
        run.log(1, {"critic/rewards/mean": 0.5})
        run.log_samples(1, [{"prompt": text, "response": text, "reward": i / 16} for i in range(16)])
    return run.path


def activities(card: str, steps: int, per_step: int = 6) -> list[Span]:
    """A second of preparation, then steps of at most four: a switch, prefill, decode and put in turns, training."""
    noise = random.Random(card)
    spans = [Span(card, "prepare", "prepare", 0, 10**9)]
    for step in range(steps):
        now = 10**9 + step * 4 * 10**9
        spans.append(Span(card, "switch", "switch", now, now + 10**9))
        spans.append(Span(card, "kv", "switch/kv", now + 10**8, now + 5 * 10**8))
        now += 10**9
        for index in range(per_step):
            length = int(noise.uniform(0.5, 1) * 2 * 10**9 / per_step)
            kind = ("prefill", "decode", "put")[index % 3]
            spans.append(Span(card, kind, kind, now, now + length))
            now += length
        spans.append(Span(card, "train", "train", now, now + 5 * 10**8))
        spans.append(Span(card, "optimizer", "optimizer", now + 5 * 10**8, now + 6 * 10**8))
    return spans
