"""The command line of `scripts/plan.py`: arguments to a setup, the setup to tables or JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.text import Text

from fusion.costmodel.layouts import parse_layout
from fusion.costmodel.presets import check_figures
from fusion.costmodel.report import as_dict, render
from fusion.costmodel.search import Ranking, SetupEstimate, estimate, rank
from fusion.costmodel.setup import Setup
from fusion.model import Parallel
from stalesync.job.config import Config
from stalesync.job.job_arguments import cluster_of, job_config, layout_of, model_of, parse, print_answer
from stalesync.job.workload import describe, describe_sharing, setup_of

OPTIONS = ("model", "model.path", "cluster", "train", "infer", "cluster.hardware", "cluster.npus")
DEFAULTS = ("model=bfloat16", "training.recompute=true")
WIDTH = 100


def answer(arguments: Sequence[str], recipes: Path) -> int:
    """Plan the requested job and print it; return 0 if the plan fits, else 1. ``recipes``: the folder that holds
    `shapes/` and `conf/`. Raise ValueError, by key, for an argument that is unknown or wrong."""
    conf = recipes / "conf"
    parsed = parse(arguments, options=OPTIONS, flags=["--json"], conf=conf)
    options = parsed.options
    model = model_of(options, recipes / "shapes")
    hardware, dies = cluster_of(options, conf)
    config, lines = job_config(parsed, conf, command="plan", defaults=DEFAULTS)
    setup = setup_of(config, model.shape, hardware=hardware, dies=dies)
    train, infer = (
        None if text == "auto" else parse_layout(side, text, world=dies, shape=model.shape)
        for side, text in ((side, layout_of(parsed, config, side)) for side in ("train", "infer"))
    )
    ranking = rank(setup)
    chosen = _chosen(setup, train, infer) if train or infer else ranking.pairs[0]
    if config.rollout.drafts.is_on:
        from stalesync.simulator.drafts import PUBLISHED_ACCEPTANCE

        lines.append(PUBLISHED_ACCEPTANCE)
    if config.longest_sample > config.training.token_budget:
        budget = f"training.token_budget={config.training.token_budget}"
        lines.append(f"a run refuses {budget}: less than the longest sample, {config.longest_sample} tokens")
    check, notes = check_figures(recipes / "shapes"), (*model.notes, describe(config), describe_sharing(setup), *lines)
    table: RenderableType = render(chosen, ranking, check=check, notes=notes)
    content = as_dict(chosen, ranking, check) | {"notes": notes}
    simulated, content["choice"] = _recommended(setup, config, options, ranking)
    print_answer(Group(table, Text(), simulated), content, json_path=parsed.paths.get("--json"), width=WIDTH)
    return 1 if chosen.problems else 0


def _recommended(
    setup: Setup, config: Config, options: Mapping[str, str], ranking: Ranking
) -> tuple[RenderableType, dict[str, object] | None]:
    """Recommend a deployment, a split and a bound by simulation: as a table, and as plain data."""
    if not ranking.deployments:
        return Text(""), None
    from stalesync.simulator import choice  # imported only now, so that a refusal takes less than a second

    try:
        with Console(stderr=True).status("simulating the deployments"):
            name = options.get("model", options.get("model.path", ""))
            candidates, chosen = choice.recommend(setup, config, name, ranking.deployments)
    except ValueError as error:
        return Text(f"Deployments were not simulated: {error}"), None
    return choice.render(candidates, chosen), choice.as_dict(candidates, chosen)


def _chosen(setup: Setup, train: Parallel | None, infer: Parallel | None) -> SetupEstimate:
    """Estimate the requested layouts; one that is `auto` (None) is the best in combination with the other."""
    best = rank(setup, (train, infer), num_exact=1).pairs[0].setup if not (train and infer) else setup
    return estimate(setup.with_layouts(train or best.train, infer or best.infer))
