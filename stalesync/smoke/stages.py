"""Run the stages one after another; a stage that fails does not stop those that can still run.

doctor ─ device ─ hccl ─ switch ─ model ─ train     device counts the cards; hccl uses all, switch and train 1, 2 or 4,
                                                    model one
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion.resources import SCRIPTS
from stalesync.process.card_environment import card_environment
from stalesync.smoke import training
from stalesync.smoke.prerequisites import Missing
from stalesync.smoke.processes import StageOutcome, run_processes
from stalesync.smoke.report import FAILED, OK, SKIPPED, StageResult, tail

NAMES = ("doctor", "device", "hccl", "switch", "model", "train")
CARDS_OF_A_RUN = (4, 2, 1)


def cards_of_a_run(cards: int) -> int:
    """Return the largest supported number of cards."""
    return next(count for count in CARDS_OF_A_RUN if count <= cards)


@dataclass
class Stages:
    """Run stages for ``kind`` of cards (`npu`, `emulated`, `cuda`). ``cards``: number of cards to use; None until
    `device` has counted them; ``missing``: what the machine lacks: every stage but `doctor` is then skipped;
    ``timeout_s``: for each stage, and for each of the two commands of `train`; ``folder``: for the model and the run of
    `train`."""

    kind: str
    cards: int | None
    missing: list[Missing]
    timeout_s: float
    folder: Path

    def run(self, name: str) -> StageResult:
        """Run a stage and report it."""
        if name != "doctor" and self.missing:
            return StageResult(name, SKIPPED, error=f"missing: {', '.join(problem.name for problem in self.missing)}")
        if name not in ("doctor", "device") and self.cards is None:
            return StageResult(name, SKIPPED, error="the stage device found no card")
        start = time.monotonic()
        stages: dict[str, Callable[[], tuple[Mapping[str, Any], StageOutcome]]] = {
            "doctor": self._doctor,
            "device": self._device,
            "hccl": lambda: self._ranks("hccl", self.cards or 1),
            "switch": lambda: self._ranks("switch", cards_of_a_run(self.cards or 1)),
            "model": lambda: self._ranks("model", 1),
            "train": self._train,
        }
        figures, outcome = stages[name]()
        status = FAILED if outcome.error else OK
        return StageResult(name, status, time.monotonic() - start, figures, outcome.error, outcome.output)

    def _doctor(self) -> tuple[Mapping[str, Any], StageOutcome]:
        outcome = self._run([[sys.executable, str(SCRIPTS / "doctor.py"), "--json", "--quick"]])
        try:
            read = json.loads(outcome.texts[0])
        except ValueError:
            return {}, outcome if outcome.error else StageOutcome(
                error="no answer in JSON", output=tail(outcome.texts[0])
            )
        lacking = [check["name"] for check in read["checks"] if check["status"] == "missing"]
        warned = [check["name"] for check in read["checks"] if check["status"] == "warn"]
        figures = {"warnings": ", ".join(warned) or "none", "checks": read["checks"]}
        return figures, StageOutcome(error=f"missing: {', '.join(lacking)}" if lacking else "")

    def _device(self) -> tuple[Mapping[str, Any], StageOutcome]:
        """Check every card, one after another, so that each is alone."""
        if self.cards is None:
            counted = self._run([self._on_card("count")])
            if counted.error:
                return {}, counted
            self.cards = int(counted.answers()[0]["cards"])
        by_card = []
        for card in range(self.cards):
            outcome = self._run([self._on_card("device", rank=card)])
            if outcome.error:
                return {"cards": card}, StageOutcome(error=f"card {card}: {outcome.error}", output=outcome.output)
            by_card.append(outcome.answers()[0])
        return {"cards": self.cards, **by_card[0], "by_card": by_card}, StageOutcome()

    def _ranks(self, stage: str, world: int) -> tuple[Mapping[str, Any], StageOutcome]:
        """Run a stage with a process on each of the first ``world`` cards; figures are the first rank's."""
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder, "store")
            outcome = self._run([self._on_card(stage, rank=rank, world=world, store=store) for rank in range(world)])
        if outcome.error:
            return {"cards": world}, outcome
        return {**outcome.answers()[0], "by_rank": outcome.answers()}, outcome

    def _train(self) -> tuple[Mapping[str, Any], StageOutcome]:
        cards = cards_of_a_run(self.cards or 1)
        for command in (
            training.base_model_command(sys.executable, self.folder, self.kind),
            training.train_command(sys.executable, self.folder, kind=self.kind, cards=cards),
        ):
            outcome = self._run([command])
            if outcome.error:
                return {"cards": cards, "folder": str(self.folder)}, outcome
        try:
            figures, wrong = training.summarise(training.read_metrics(self.folder))
        except (OSError, ValueError) as error:
            figures, wrong = {}, f"metrics.jsonl: {error}"
        return {"cards": cards, **figures}, StageOutcome(error=wrong)

    def _run(self, commands: list[list[str]]) -> StageOutcome:
        variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
        variables |= card_environment(self.kind, cards=self.cards or 1, deterministic=True)
        return run_processes(commands, timeout_s=self.timeout_s, cwd=self.folder, variables=variables)

    def _on_card(self, stage: str, *, rank: int = 0, world: int = 1, store: Path | None = None) -> list[str]:
        command = [sys.executable, "-m", "stalesync.smoke.on_card", stage, "--kind", self.kind, "--rank", str(rank)]
        return command + ["--world", str(world)] + (["--store", str(store)] if store else [])
