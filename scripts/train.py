"""Run a training job.

python scripts/train.py model.path=FOLDER data=addition algorithm=grpo cluster.npus=4 device=emulated
python scripts/train.py --cfg job …       prints the composed config and stops
python scripts/train.py --help            lists the groups and every key with its default and meaning
"""

from stalesync.process.stopping import ignore_stops, leave_at_stops

if __name__ == "__main__":
    leave_at_stops()  # before anything else is imported, which takes seconds

import sys  # noqa: E402
from typing import Any  # noqa: E402

from fusion.resources import RECIPES, as_called, outlive_readers  # noqa: E402

CONF = RECIPES / "conf"
USAGE = as_called("usage: python scripts/train.py [--help] [--cfg job] [GROUP=CHOICE ...] [KEY=VALUE ...]")


def main() -> None:
    outlive_readers()
    from stalesync.command_line import refuse
    from stalesync.job.overrides import accepted, choices_in, composed, help_text

    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(USAGE, as_called(__doc__.rstrip()), help_text(choices_in(CONF)), sep="\n\n")
        return
    try:
        sys.argv[1:] = words = accepted(words, CONF)
        values = [word for word in words if "=" in word and not word.startswith(("-", "hydra."))]
        config = composed(CONF, values)
    except ValueError as error:
        refuse(USAGE, error)
    if values == words:
        run(config)
    else:
        run_by_hydra()


def run_by_hydra() -> None:
    """Let Hydra act on its own options and keys. It composes the config twice more."""
    import hydra
    from omegaconf import OmegaConf

    from stalesync.job.overrides import register

    register()
    main = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    main(lambda composed: run(OmegaConf.to_object(composed)))()


def run(config: Any) -> None:
    from stalesync.command_line import refuse, run_job
    from stalesync.job.config import Config

    assert isinstance(config, Config)
    try:
        config.validate()  # before torch and ray are loaded, so that a wrong value is refused at once
    except ValueError as error:
        refuse(USAGE, error)
    run_job(config)


if __name__ == "__main__":
    try:
        main()
    finally:
        ignore_stops()
