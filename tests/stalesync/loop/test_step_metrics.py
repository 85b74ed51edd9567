"""What an evaluation between two steps adds to the second one: nothing."""

from types import SimpleNamespace

import pytest

from fusion.telemetry import MemoryLedger, Metrics, Span
from stalesync.loop import step_metrics as module
from stalesync.loop.step_metrics import StepMetrics


def report(kind, start_s, end_s, peak):
    """Of card 0."""
    metrics, memory = Metrics(), MemoryLedger()
    metrics.add("rollout/generated_tokens", 1.0)
    memory.record("infer", {"kv": peak}, peak, capacity=1 << 30)
    span = Span("card 0", kind, kind, round(start_s * 1e9), round(end_s * 1e9))
    return SimpleNamespace(metrics=metrics, memory=memory, spans=[span])


def test_cards_time_metrics_and_memory_of_an_excluded_block_are_not_the_steps(monkeypatch):
    now_s, logged = 0.0, []
    monkeypatch.setattr(module, "wall_ns", lambda: round(now_s * 1e9))
    metrics = StepMetrics(1, SimpleNamespace(log_spans=lambda *spans: logged.extend(spans)))
    metrics.take([report("generate", 0.0, 1.0, peak=1 << 20)])
    now_s = 2.0
    with metrics.excluded():
        metrics.take([report("generate", 2.0, 9.0, peak=1 << 29)])
        now_s = 10.0
    metrics.take([report("train", 11.0, 12.0, peak=2 << 20)])
    row = metrics.close(round(12e9), {})
    assert {name: row[name] for name in row if name.startswith("timing_s/card/")} == pytest.approx(
        {"timing_s/card/generate": 1.0, "timing_s/card/train": 1.0, "timing_s/card/idle": 2.0}
    )
    assert row["perf/utilisation"] == pytest.approx(0.5) and row["memory/infer/peak_mib"] == 2.0
    assert row["rollout/generated_tokens"] == 1.0 and len(logged) == 3, "the timeline has the evaluation"
