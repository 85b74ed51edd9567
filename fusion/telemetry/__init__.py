"""Measure, show and record a run. Every package may import it; it imports none.

    worker                     controller                                       writes / shows
    Metrics.take()        ──►  Metrics.merge, throughput            ──►  RunFolder.log       metrics.jsonl, loggers
    Timeline.drain()      ──►  Usage.count → a row's perf/…         ──►  RunFolder.log_spans timeline.json (Perfetto)
    MemoryLedger.record() ──►  MemoryLedger.merge → .metrics()      ──►  a row's memory/…
                               finished samples                     ──►  RunFolder.log_samples
                               every step, every phase              ──►  LiveView (terminal) or a line per step (pipe)
                               the end, also after a crash          ──►  RunReport (text), page/ (report.html)

Files are written so that they are readable after a run was killed; metrics have verl's names."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
