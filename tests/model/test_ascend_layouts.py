"""Our formats against the shapes of vllm-ascend's and MindSpeed's tensors, recorded from their sources.

`data/ascend_layouts.json` has, of each tensor, its shape in the sizes of one rank, whether it is stored transposed, the
order of what is fused, and repository, commit, path and lines where that is written. Neither can be run here.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from fusion.model import LocalParam, Parallel
from fusion.model.formats import MEGATRON, VLLM_ASCEND, Format, local_table
from tests.helpers import tiny_config

RECORDED = json.loads((Path(__file__).parent / "data" / "ascend_layouts.json").read_text())
SPARSE = tiny_config(tie_word_embeddings=False, vocab_size=192, mlp_only_layers=[1])
ALIKE = tiny_config(tie_word_embeddings=False, vocab_size=192), tiny_config(False, vocab_size=192)
LAYOUTS = [Parallel(), Parallel(2, tp=2, ep=2), Parallel(2, tp=2, etp=2), Parallel(4, ep=4), Parallel(4, tp=4, etp=4)]


def entry_of(program: str, param: LocalParam) -> dict[str, Any] | None:
    """The record of a tensor: the one whose name it ends with, with any number of an expert."""
    name = ".".join("0" if word.isdigit() else word for word in param.name.split("."))
    found = [entry for entry in RECORDED[program]["tensors"] if name.endswith(entry["name"])]
    return max(found, key=lambda entry: len(entry["name"]), default=None)


def shape_of(entry: dict[str, Any], sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape of a record: a sum of products for each dimension."""
    return tuple(
        sum(prod(factor if isinstance(factor, int) else sizes[factor] for factor in term) for term in terms)
        for terms in entry["shape"]
    )


def sizes_of(config: Any, parallel: Parallel, expert: bool, vocabulary: int) -> dict[str, int]:
    return dict(
        D=config.hidden_size,
        C=config.head_dim,
        H=config.num_heads // parallel.tp,
        K=max(1, config.num_kv_heads // parallel.tp),
        F=config.moe_intermediate_size // parallel.etp if expert else config.intermediate_size // parallel.tp,
        E=config.num_experts // parallel.ep,
        N=config.num_experts,
        V=vocabulary // parallel.tp,
    )


def fused_order(param: LocalParam, dim: int) -> list[str]:
    """The projections of the first group or expert along a dimension."""
    first = [part for part in param.parts if len(param.shape) < 3 or part.local[0] == (0, 1)]
    names = [part.name.split(".")[-2] for part in sorted(first, key=lambda part: part.local[dim])]
    return list(dict.fromkeys(names))


def check(program: str, format: Format, config: Any, parallel: Parallel) -> set[str]:
    """Compares a table with the records; returns the names of those that it has."""
    used = set()
    for param in local_table(format, config, parallel, parallel.world - 1, max_bytes=1 << 30, itemsize=2):
        entry = entry_of(program, param)
        assert entry is not None or len(param.shape) == 1, f"{param.name} is not recorded"
        if entry is None:
            continue
        used.add(entry["name"])
        sizes = sizes_of(config, parallel, param.expert, config.vocab_size)
        assert param.shape == shape_of(entry, sizes), (param.name, entry["source"])
        assert {part.transposed for part in param.parts} <= {entry.get("transposed", False)}, param.name
        if order := entry.get("order"):
            assert fused_order(param, order["dim"]) == order["of"], (param.name, entry["source"])
    return used


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_the_ascend_variant_has_the_shapes_of_vllm_ascend(parallel):
    used = check("vllm_ascend", VLLM_ASCEND, SPARSE, parallel)
    assert used == {entry["name"] for entry in RECORDED["vllm_ascend"]["tensors"]}


@pytest.mark.parametrize("parallel", [*LAYOUTS[:4], Parallel(4, tp=2, ep=2, etp=2)], ids=str)
def test_megatrons_format_has_the_shapes_of_mindspeed(parallel):
    dense = Parallel(parallel.world, tp=parallel.tp)
    used = set.union(*(check("mindspeed", MEGATRON, c, p) for c, p in zip(ALIKE, (parallel, dense), strict=True)))
    recorded = {entry["name"] for entry in RECORDED["mindspeed"]["tensors"]}
    assert used == recorded


def test_every_record_says_where_it_is_from():
    for program in ("vllm_ascend", "mindspeed"):
        assert len(RECORDED[program]["commit"]) == 40 and RECORDED[program]["branch"]
        for entry in RECORDED[program]["tensors"] + RECORDED[program].get("other", []):
            assert entry["source"] and all(place["path"].endswith(".py") for place in entry["source"])
            assert all(min(place["lines"]) > 0 for place in entry["source"])
