"""What the benchmark reads out of a profile."""

from __future__ import annotations

import pytest

from benchmarks.offload_sides import read_trace, union


def event(cat: str, name: str, start: float, stop: float, stream: int) -> dict:
    return {"cat": cat, "name": name, "ts": start, "dur": stop - start, "args": {"stream": stream}}


def test_overlap_is_the_time_of_copies_with_a_kernel_on_another_stream():
    figures = read_trace(
        [
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 0, 40, 20),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 40, 100, 20),
            event("kernel", "gemm", 30, 50, 7),
            event("kernel", "gemm", 45, 60, 7),
            event("kernel", "fill", 0, 100, 20),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 200, 210, 24),
            {"ph": "M", "name": "process_name"},
        ]
    )
    assert figures["DtoH"]["copy_s"] == pytest.approx(100e-6) and figures["DtoH"]["share"] == 0.3
    assert figures["DtoH"]["copy_streams"] == [20] and figures["DtoH"]["compute_streams"] == [7]
    assert figures["HtoD"]["share"] == 0


def test_union_joins_what_touches():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
