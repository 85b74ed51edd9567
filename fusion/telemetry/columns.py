"""Define the columns of the step table: metric and format of each. Used by the terminal view and the plain view."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fusion.telemetry.memory import MIB, human_bytes

ABSENT = "–"
Row = Mapping[str, float]


@dataclass(frozen=True)
class StepColumn:
    """One column: a header of up to two lines, its metrics (the first existing one is shown), and their format.

    A name ending in `*` is the sum of all metrics with this prefix. ``only_with``: the metric without which the column
    is left out; "": there is none."""

    title: str
    names: tuple[str, ...]
    show: Callable[[float], str]
    width: int
    only_with: str = ""

    def cell(self, row: Row) -> str:
        for name in self.names:
            if name.endswith("*"):
                parts = [value for key, value in row.items() if key.startswith(name[:-1])]
                if parts:
                    return self.show(sum(parts))
            elif row.get(name) is not None:
                return self.show(row[name])
        return ABSENT


def seconds(value: float) -> str:
    """Format seconds in at most five characters: `0.04`, `12.3`, `3725`."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 999.95 else f"{value:.0f}"


def small(value: float) -> str:
    """Format a number near zero in at most seven characters: `0`, `0.0123`, `1.2e-05`."""
    return "0" if value == 0 else f"{value:.4f}" if 1e-3 <= abs(value) < 10 else f"{value:.2g}"


def share(value: float) -> str:
    return f"{value:.0%}"


REFERENCE_KL = ("actor/kl_loss", "actor/reward_kl_penalty", "critic/kl")


def _optional(title: str, name: str, show: Callable[[float], str], width: int) -> StepColumn:
    return StepColumn(title, (name,), show, width, only_with=name)


COLUMNS = (
    StepColumn("step", ("step",), lambda value: f"{value:.0f}", width=4),
    StepColumn("reward", ("critic/rewards/mean",), lambda value: f"{value:.3f}", width=6),
    _optional("live\ngroups", "frac_reward_zero_std", lambda dead: f"{1 - dead:.0%}", width=6),
    _optional("zero\nadv.", "critic/advantages/zero_share", share, width=5),
    _optional("cut", "response_length/clip_ratio", share, width=4),
    _optional("failed", "reward/failed_share", share, width=6),
    _optional("env\nfailed", "env/failed", lambda groups: f"{groups:.0f}", width=6),
    _optional("ESS", "rollout_corr/rollout_is_eff_sample_size", share, width=5),
    _optional("kept\nmass", "training/kept_mass_mean", lambda value: f"{value:.3f}", width=5),
    StepColumn("length", ("response_length/mean",), lambda value: f"{value:.1f}", width=6),
    StepColumn("KL", REFERENCE_KL, small, width=7),
    StepColumn("tokens\n/s", ("perf/tokens_per_s", "perf/throughput"), lambda value: f"{value:,.0f}", width=7),
    StepColumn("gen\ns", ("timing_s/gen",), seconds, width=5),
    StepColumn("reward\ns", ("timing_s/reward",), seconds, width=6),
    StepColumn("ref\ns", ("timing_s/ref",), seconds, width=5),
    StepColumn("train\ns", ("timing_s/train", "timing_s/update_actor"), seconds, width=5),
    StepColumn("switch\ns", ("timing_s/switch", "timing_s/switch_*"), seconds, width=6),
    StepColumn(
        "tokens\n/pass",
        ("rollout/tokens_per_forward_mean",),
        lambda value: f"{value:.2f}",
        width=6,
        only_with="rollout/draft_mib_max",
    ),
    StepColumn("infer\nHBM", ("memory/infer/peak_mib",), lambda mib: human_bytes(mib * MIB), width=5),
    StepColumn("train\nHBM", ("memory/train/peak_mib",), lambda mib: human_bytes(mib * MIB), width=5),
)


def columns_for(row: Row) -> tuple[StepColumn, ...]:
    """Choose the columns for rows like this one: what shows whether there is a signal to learn from comes first, where
    it was measured. Without a reference model, the KL is that to the policy that generated, and its header is
    different; without drafts a forward pass yields one token a sequence."""
    columns = [column for column in COLUMNS if not column.only_with or column.only_with in row]
    if any(name in row for name in REFERENCE_KL) or "actor/ppo_kl" not in row:
        return tuple(columns)
    return tuple(
        replace(column, title="old\nKL", names=("actor/ppo_kl",)) if column.title == "KL" else column
        for column in columns
    )


def header_lines(columns: Sequence[StepColumn]) -> list[str]:
    """Return the header as plain aligned text, two lines."""
    titles = [[*column.title.split("\n"), ""][:2] for column in columns]
    return [align(cells, columns) for cells in zip(*titles, strict=True)]


def align(cells: Sequence[str], columns: Sequence[StepColumn]) -> str:
    """Align cells to the right under their headers; a cell that is too wide shifts the rest of its line."""
    return " ".join(cell.rjust(column.width) for cell, column in zip(cells, columns, strict=True)).rstrip()


def duration(value: float) -> str:
    """Format a duration: `4.2s`, `48s`, `3m20s`, `2h05m`."""
    if value < 9.95:
        return f"{value:.1f}s"
    whole = round(value)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
