"""Measures, shows and records a run. Every room may import it; it imports none.

    worker                     controller                                       leaves / shows
    Metrics.take()        ──►  Metrics.merge, throughput            ──►  RunFolder.log       metrics.jsonl, TensorBoard
    Timeline.drain()      ──►  Usage.count → a row's perf/…         ──►  RunFolder.log_spans timeline.json (Perfetto)
    MemoryLedger.record() ──►  MemoryLedger.merge → .metrics()      ──►  a row's memory/…, a table at the end
                               finished samples                     ──►  RunFolder.log_samples
                               every step, every phase              ──►  LiveView (terminal) or a line a step (pipe)
                               the end, also after a crash          ──►  RunReport: where each card's wall clock went

Files are written so that a killed run leaves them readable; figures follow verl's names.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
