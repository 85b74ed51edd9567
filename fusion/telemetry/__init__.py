"""What a run measures, shows and leaves. Every room may import it; it imports none.

    worker                     controller                                       leaves / shows
    Metrics.take()        ──►  Metrics.merge, throughput            ──►  RunFolder.log       metrics.jsonl, TensorBoard
    Timeline.drain()      ──►  Usage.count → a row's perf/…         ──►  RunFolder.log_spans timeline.json (Perfetto)
    MemoryLedger.record() ──►  MemoryLedger.merge → .metrics()      ──►  a row's memory/…, a table at the end
                               finished samples                     ──►  RunFolder.log_samples
                               every step, every phase              ──►  LiveView (terminal) or a line a step (pipe)
                               the end, also after a crash          ──►  RunReport: where each card's wall clock went

Files are written so that a killed run leaves them readable; figures follow verl's names.
"""

from fusion.telemetry.live import Bar, LiveView, progress
from fusion.telemetry.memory import MemoryLedger, human_bytes
from fusion.telemetry.metrics import Metrics, merge_metrics, rule_of, throughput
from fusion.telemetry.report import Answer, RunReport, compare
from fusion.telemetry.run_folder import RunFolder, describe
from fusion.telemetry.timeline import (
    WAIT_DATA,
    WAIT_WEIGHTS,
    CardSummary,
    Span,
    Timeline,
    summarize,
    summarize_run,
    wall_ns,
)
from fusion.telemetry.trace import TimelineFile, read_timeline
from fusion.telemetry.usage import Usage

__all__ = [
    "WAIT_DATA",
    "WAIT_WEIGHTS",
    "Answer",
    "Bar",
    "CardSummary",
    "LiveView",
    "MemoryLedger",
    "Metrics",
    "RunFolder",
    "RunReport",
    "Span",
    "Timeline",
    "TimelineFile",
    "Usage",
    "compare",
    "describe",
    "human_bytes",
    "merge_metrics",
    "progress",
    "read_timeline",
    "rule_of",
    "summarize",
    "summarize_run",
    "throughput",
    "wall_ns",
]
