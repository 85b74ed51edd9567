"""The table of families and checks in docs/model_family.md is what the tests cover."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.costmodel import test_shape as plan
from tests.ep_switch import test_families as switch
from tests.families import KINDS
from tests.inference import test_families as engine
from tests.model import test_families as model
from tests.training import test_families as trainer
from tests.warm import ROOT

PAGE = ROOT / "docs" / "model_family.md"
OLDER = ("qwen3", "qwen3_moe")
"""Families whose several ranks are tested in other files, too, since before there were others"""
ROWS: dict[str, Callable[..., Any]] = {
    "logits equal transformers'": model.test_random_models_compute_what_transformers_does,
    "gradient norm equals": model.test_random_models_compute_what_transformers_does,
    "read, written, loaded": model.test_the_table_names_what_transformers_saves,
    "parameter table in all layouts": model.test_every_layout_covers_every_tensor_and_keeps_experts_apart,
    "plan: elements": plan.test_every_rank_holds_what_the_parameter_table_says,
    "switch plans between": switch.test_a_plan_brings_every_element_to_its_place,
    "greedy tokens equal": engine.test_greedy_equals_generate_in_float64,
    "logits and exports in": model.test_logits_and_export_in_layouts,
    "with `rollout.engine.batch_invariant": engine.test_batch_invariant_logprobs_are_those_of_a_request_alone,
    "an engine of several ranks": engine.test_every_layout_samples_the_same_tokens_and_routes_alike,
    "switch there and back": switch.test_there_and_back_is_bitwise,
    "loss and gradient norm across": trainer.test_a_layout_trains_as_one_rank_does,
}
"""Beginning of a row → the test behind it"""


def cases(test: Callable[..., Any]) -> Iterator[tuple[str, bool]]:
    """Yield (family, whether only in the extended run) of a test's cases; of one that draws the family, all."""
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    for mark in marks:
        names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else [*mark.args[0]]
        if "kind" not in names:
            continue
        for case in mark.args[1]:
            values = case.values if hasattr(case, "marks") else case if isinstance(case, tuple) else (case,)
            is_extended = any(one.name == "extended" for one in getattr(case, "marks", ()))
            yield values[names.index("kind")], is_extended
        return
    yield from ((kind, False) for kind in KINDS)


def table() -> dict[str, list[str]]:
    """The rows of the page's table: beginning → cells."""
    lines = PAGE.read_text().partition("## What is checked")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def test_columns_are_the_families():
    assert table()[""] == [*KINDS]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_states_what_is_tested(row):
    (stated,) = [cells for name, cells in table().items() if name.startswith(row)]
    tested = list(cases(ROWS[row]))
    for kind, cell in zip(KINDS, stated, strict=True):
        marks = ["●"] * ((kind, False) in tested) + ["○"] * ((kind, True) in tested)
        if kind in OLDER:
            assert "●" in cell, f"{row}: {kind}"
        else:
            assert cell.split() == marks, f"{row}: {kind}"


def test_every_row_has_a_test():
    others = [name for name in table() if not name.startswith((*ROWS, "---")) and name]
    assert others == ["every field of transformers' config read, refused or inert; its defaults"]
