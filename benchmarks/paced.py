"""Run training on emulated cards of modelled speed as a user would, stop it after some steps; compute its figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Figures, progress
from benchmarks.runs import Row, train

MAX_OVERRUN = 0.03
"""By how much cards of a valid run may overrun their modelled time"""


@dataclass(frozen=True)
class Mode:
    """A deployment, its staleness bound, and the cards that only generate."""

    fusion: str
    staleness: int
    generating: int | None = None

    @property
    def warm(self) -> int:
        """Steps that are not measured. With staleness, an engine reports its work when it adopts weights, so the second
        step's figures include some of the first's."""
        return 2 if self.staleness else 1

    def overrides(self) -> list[str]:
        cards = [] if self.generating is None else [f"fusion.infer_cards={self.generating}"]
        return [f"fusion={self.fusion}", f"stalesync.max_staleness={self.staleness}", *cards]

    def __str__(self) -> str:
        return f"{self.fusion} s={self.staleness}{'' if self.generating is None else f' {self.generating}'}"


@dataclass(frozen=True)
class Workload:
    """The work of a step. A token of the run represents ``tokens`` modelled ones, a second ``speed`` modelled ones.
    ``training``: factor of the modelled cost of training; ``median``, ``cap``: of response lengths, in tokens of the
    run, without a median they are sampled; ``sequences``: that a card decodes at a time."""

    training: float = 1.0
    cards: int = 8
    prompts: int = 64
    group: int = 8
    median: int | None = 8
    cap: int = 68
    sequences: int = 8
    tokens: int = 128
    speed: float = 52.0
    model: str = "olmoe_7b"
    options: tuple[str, ...] = ("data=addition", "data.max_prompt_length=8")

    def overrides(self) -> list[str]:
        forced = [] if self.median is None else [f"rollout.sampling.forced_median={self.median}"]
        own = f"""device=paced device.pace={self.model} device.pace_tokens={self.tokens} device.pace_speed={self.speed}
        device.pace_training={self.training} cluster.stage_timeout_s=300 cluster.hardware=ascend_910c
        cluster.npus={self.cards} data.prompts_per_step={self.prompts} algorithm.group_size={self.group}
        rollout.max_response_length={self.cap} rollout.engine.max_seqs={self.sequences} run.eval_prompts=0
        run.steps=1000 training.share_prefixes=off"""  # as the systems that it is compared with
        return [*own.split(), *forced, *self.options]


@dataclass(frozen=True)
class Measured:
    """The metrics of the measured steps, in seconds and tokens of the run; work is summed over all cards."""

    mode: Mode
    workload: Workload
    rows: list[Row]
    home: Path = Path()
    """Folder that the run was started in"""

    def sum(self, *names: str) -> float:
        return sum(row.get(name, 0.0) for row in self.rows for name in names)

    def mean(self, *names: str) -> float:
        return self.sum(*names) / len(self.rows)

    def work(self, name: str, *kinds: str) -> float:
        """Modelled seconds of some kinds of work; without kinds, of all."""
        prefix = f"pace/{name}_s/"
        keys = [f"{prefix}{kind}" for kind in kinds] or {k for row in self.rows for k in row if k.startswith(prefix)}
        return self.sum(*keys)

    @property
    def step_s(self) -> float:
        return self.mean("timing_s/step")

    @property
    def train_s(self) -> float:
        """Seconds per step in which the training cards train, all at once."""
        cards = self.workload.cards - (self.mode.generating or 0)
        return self.work("modelled", "train", "optimizer") / len(self.rows) / cards

    @property
    def generation_s(self) -> float:
        """Modelled work of generation per step, in full batches, in seconds of one card."""
        return self.work("ideal", "decode", "prefill") / len(self.rows)

    @property
    def training_s(self) -> float:
        """Modelled work of training per step, in seconds of one card."""
        return self.work("ideal", "train", "optimizer") / len(self.rows)

    def separate_s(self, generating: int, ahead: bool) -> float:
        """Compute the seconds in which all modelled work of a step would be done in `separate`, if ``generating`` cards
        did that of generation and the others that of training: at once if generation runs ``ahead``, else in turns."""
        sides = self.generation_s / generating, self.training_s / (self.workload.cards - generating)
        return max(sides) if ahead else sum(sides)

    def best_split(self, ahead: bool) -> int:
        """Return the number of generating cards at which the work of a step would be done first in `separate`."""
        return min(range(1, self.workload.cards), key=lambda generating: self.separate_s(generating, ahead))

    @property
    def tokens(self) -> float:
        return self.sum("perf/total_num_tokens")

    @property
    def overrun(self) -> float:
        paced = self.work("modelled") + self.sum("pace/waited_s")
        return self.work("overrun") / paced if paced else 0.0

    def bound_s(self, once: "Measured") -> float:
        """Compute the seconds of all modelled work if it were spread over all cards. ``once``: a run in which every
        prompt was prefilled exactly once."""
        decoded = self.work("ideal", "decode") / self.sum("rollout/generated_tokens")
        trained = self.sum("response_length/mean") * self.workload.prompts * self.workload.group
        prefill = once.work("ideal", "prefill") / once.tokens * self.tokens
        return (decoded * trained + prefill + self.work("ideal", "train", "optimizer")) / self.workload.cards

    def figures(self, once: "Measured | None" = None) -> Figures:
        """Return the figures in modelled seconds and tokens. ``suspended``: samples that had tokens and had to wait:
        their engine stopped, or it adopted new weights and prefilled them again."""
        speed, rate = self.workload.speed, self.workload.tokens / self.workload.speed
        bound_s, wall_s, bound = self.bound_s(once or self), self.sum("timing_s/step"), self.mode.staleness
        seen = max(lag for lag in range(bound + 3) if lag == 0 or self.sum(f"staleness/lag_{lag}_count"))
        figures = {
            "tokens_per_s": self.tokens / wall_s * rate,
            "bound_tokens_per_s": self.tokens / bound_s * rate,
            "ratio_to_bound": bound_s / wall_s,
            "utilisation": self.work("ideal") / (self.workload.cards * wall_s),
            "step_s": self.step_s * speed,
            "tail_s": self.mean("timing_s/gen_tail") * speed,
            "switch_s": self.mean("timing_s/switch") * speed,
            "stale_beyond_bound": max(0, seen - bound),
            "pace_overrun": self.overrun,
        }
        if bound:
            figures["suspended"] = int(self.sum("rollout/suspended_total", "rollout/interrupted"))
            figures["mixed"] = int(self.sum("staleness/mixed_versions_count"))
        return figures


def run(mode: Mode, workload: Workload, folder: Path, steps: int, overrides: Sequence[str] = ()) -> Measured:
    """Start a run of the model in ``folder``/model, wait until ``steps`` steps behind the warm-up have ended, and stop
    it. The same mode may run repeatedly."""
    home, last = folder / f"run-{len([*folder.glob('run-*')])}", mode.warm + steps
    options: Any = [f"model.path={folder / 'model'}", *workload.overrides(), *overrides, *mode.overrides()]
    rows = train(home, options, until=lambda rows: len(rows) >= last, poll_s=0.5)
    measured = Measured(mode, workload, rows[mode.warm : last], home)
    progress(" ".join([str(mode), *overrides]), measured.figures())
    return measured
