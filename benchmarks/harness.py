"""Run a benchmark: arguments, sides in turns, figures against their targets, and where and when they were measured.

    BENCHMARK = Benchmark(
        __doc__,
        [Option("rounds", 5, smoke=1, help="…")],
        "*.bytes_per_sample <= 1000",                       targets of figures by their path; `*` matches
    )
    BENCHMARK.run_as(__name__)                              what takes time is imported behind it: --help needs no torch

    def measure(args: Arguments) -> Figures: …              or several functions, each of which is a part (`parts`)

Figures are dicts of numbers, by name, and of such dicts. ``--smoke`` runs the same parts with the toy sizes of the
options: it shows that a benchmark works, and measures nothing.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent

Figures = dict[str, Any]
Result = TypeVar("Result")


class Arguments(argparse.Namespace):
    """The settings of a run; what is measured once for several parts is cached by them."""

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Option:
    """A setting of a benchmark: a field of the arguments. ``smoke``: its value with --smoke; None: the default."""

    name: str
    default: Any
    smoke: Any = None
    help: str = ""
    choices: Sequence[str] | None = None

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        flag = f"--{self.name.replace('_', '-')}"
        if isinstance(self.default, bool):
            parser.add_argument(flag, action="store_true", default=None, help=self.help)
        else:
            kind = str if self.default is None else type(self.default)
            shown = self.help if self.default in (None, "") else f"{self.help} (default: {self.default})"
            parser.add_argument(flag, type=kind, choices=self.choices, help=shown)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark and its command line.

    Attributes:
        targets: `PATH <= BOUND` or `PATH >= BOUND`, separated by commas; PATH may contain wildcards.
        parts: name → `module:function`, or a function of the benchmark's own file; a single one has the name "".
        sizes: fields of the arguments that only --smoke changes: name → value, and that with --smoke.
        default: names of the parts that run without --only; (): all.
        extra: what follows the options on the command line, e.g. overrides of a run's config; None: nothing may.
        must_hold: whether a missed target ends with exit status 1.
        check: arguments → what is wrong with them, "" if nothing is.
    """

    doc: str
    options: Sequence[Option] = ()
    targets: str = ""
    parts: Mapping[str, str] = field(default_factory=lambda: {"": "measure"})
    default: Sequence[str] = ()
    extra: str | None = None
    must_hold: bool = False
    sizes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    check: Callable[[Arguments], str] = lambda args: ""

    def parse(self, arguments: Sequence[str] | None = None) -> Arguments:
        """Parse a command line; ends the process where it is wrong, as argparse does."""
        parser = argparse.ArgumentParser(description=self.doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--json", type=Path, help="write figures, machine and commit to this file")
        parser.add_argument("--smoke", action="store_true", help="toy sizes: shows in seconds that the benchmark works")
        if len(self.parts) > 1:
            parser.add_argument("--only", help=f"some of {','.join(self.parts)}")
        for option in self.options:
            option.add_to(parser)
        if self.extra:
            parser.add_argument("overrides", nargs="*", help=self.extra)
        args = parser.parse_args(arguments, Arguments())
        only = getattr(args, "only", None)
        args.parts = list(self.default or self.parts) if only is None else only.split(",")
        if unknown := [name for name in args.parts if name not in self.parts]:
            parser.error(f"--only: expected some of {', '.join(self.parts)}, got {', '.join(unknown)}")
        args.given = {option.name for option in self.options if getattr(args, option.name, None) is not None}
        if wrong := self.check(args):
            parser.error(wrong)
        for option in self.options:
            if option.name not in args.given:
                toy = args.smoke and option.smoke is not None
                setattr(args, option.name, option.smoke if toy else option.default)
        for name, values in self.sizes.items():
            setattr(args, name, values[args.smoke])
        return args

    def run_as(self, name: str) -> None:
        """Run a benchmark's command line and end the process, if its module is the script that was started."""
        if name == "__main__":
            sys.exit(self.main())

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Measure the parts, print their figures, and write them to --json."""
        args = self.parse(arguments)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ["PYTHONPATH"] = str(ROOT)
        about = machine()
        print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
        figures: Figures = {}
        for name in args.parts:
            module, _, function = self.parts[name].rpartition(":")
            started = f"benchmarks.{Path(sys.argv[0]).stem}"  # not the script itself: processes find functions by name
            measured = getattr(importlib.import_module(module or started), function)(args)
            figures |= {name: measured} if name else measured
        print("\n".join(rendered(figures)))
        checked = list(compared(figures, self.targets)) if self.must_hold or not args.smoke else []
        print("\n".join(checked))
        if args.json:
            sizes = {name: str(getattr(args, name)) for name in (*self.sizes, *(one.name for one in self.options))}
            result = {"machine": about, "sizes": sizes, "smoke": args.smoke, "figures": figures, "checked": checked}
            args.json.write_text(json.dumps(result, indent=2) + "\n")
        if self.must_hold and any(line.startswith("MISSED") for line in checked):
            sys.exit(1)


def machine() -> dict[str, Any]:
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit or "unknown",
        "cpu": cpu or "unknown",
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "torch": importlib.metadata.version("torch"),
    }


# ---- figures


def rendered(figures: Mapping[str, Any], name: str = "") -> Iterator[str]:
    """Yield lines that show figures: numbers as `name value`, dicts that all have the same names as a table."""
    rows = {key: value for key, value in figures.items() if isinstance(value, Mapping)}
    for key, value in figures.items():
        is_details = isinstance(value, list) and value and isinstance(value[0], Mapping)  # for the file
        if key not in rows and not is_details:
            yield f"{f'{name}{key}':40} {shown(value)}"
    columns, *others = {tuple(row) for row in rows.values()} or {()}
    plain = not any(isinstance(one, (Mapping, list)) for row in rows.values() for one in row.values())
    if others or len(rows) < 2 or len(columns) > 12 or not plain:
        for key, row in rows.items():
            yield from rendered(row, f"{name}{key}.")
        return
    cells = [["", *columns], *([f"{name}{key}", *map(shown, row.values())] for key, row in rows.items())]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *rest in cells:
        numbers = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *numbers])


def shown(value: Any) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return str(value)
    if isinstance(value, (list, tuple)):
        return " ".join(map(shown, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def compared(figures: Mapping[str, Any], targets: str) -> Iterator[str]:
    """Yield a line for each figure that has a target, with whether it is met."""
    for path, value in leaves(figures):
        for pattern, relation, bound in map(str.split, filter(None, targets.split(","))):
            if value is not None and fnmatchcase(path, pattern):
                met = value <= float(bound) if relation == "<=" else value >= float(bound)
                yield f"{'ok    ' if met else 'MISSED'} {path}: {shown(value)}, target {relation} {bound}"


def leaves(figures: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path, its names joined by dots, and value of every figure."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def progress(name: str, figures: Figures) -> Figures:
    """Print the numbers of one row, as they come; return it."""
    numbers = ((key, value) for key, value in figures.items() if not isinstance(value, (Mapping, list)))
    print(f"{name}:", ", ".join(f"{key} {shown(value)}" for key, value in numbers), flush=True)
    return figures


def rows_of(cases: Iterable[Any], measure: Callable[[Any], Figures]) -> Figures:
    """Measure case after case, and print its row; return the rows by the case's name."""
    return {str(case): progress(str(case), measure(case)) for case in cases}


# ---- sides


def in_rotation(names: Sequence[str], round: int) -> list[str]:
    """Return all ``names``, beginning one further in every round; ``round`` may be negative (a warm-up)."""
    first = round % len(names)
    return [*names[first:], *names[:first]]


def in_turns(sides: Mapping[str, Callable[[int], Result]], rounds: int, warm_ups: int = 1) -> dict[str, list[Result]]:
    """Run every side in every round, in rotating order, so that none always runs first or after the same other; return
    their results by round, without those of the rounds that warm up, which are numbered from -1 down."""
    results: dict[str, list[Result]] = {name: [] for name in sides}
    for round in range(-warm_ups, rounds):
        for name in in_rotation(list(sides), round):
            result = sides[name](round)
            if round >= 0:
                results[name].append(result)
    return results


def medians(results: Mapping[str, Sequence[float]], suffix: str = "") -> dict[str, float]:
    """Return the median of every side, named with ``suffix``."""
    return {f"{name}{suffix}": statistics.median(values) for name, values in results.items()}


def medians_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of every figure over all rows, which have the same names."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def ratio_in_turns(sides: Mapping[str, Callable[[int], float]], rounds: int) -> Figures:
    """Return the median seconds of two sides that run in turns, and the ratio of the first to the second."""
    seconds = medians(in_turns(sides, rounds), "_s")
    first, second = seconds.values()
    return seconds | {"ratio": first / second}


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter, device: Any = None) -> float:
    """Return the seconds of a call, from a synchronised ``device`` to a synchronised one."""
    return timed_result(work, clock, device)[0]


def timed_result(
    work: Callable[[], Result], clock: Callable[[], float] = time.perf_counter, device: Any = None
) -> tuple[float, Result]:
    """Return the seconds of a call, as `timed`, and its result."""
    settle = device.synchronize if device is not None else lambda: None
    settle()
    start_s = clock()
    result = work()
    settle()
    return clock() - start_s, result


def resident_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
