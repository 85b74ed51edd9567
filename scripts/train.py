"""Runs a job.

    python scripts/train.py model.path=FOLDER data=addition algorithm=grpo cluster.npus=4 device=emulated
    python scripts/train.py --cfg job …       prints the resolved config and stops

Config groups and their files are in recipes/conf; every key is documented at its dataclass field.
"""

import sys
from pathlib import Path

CONF = Path(__file__).resolve().parent.parent / "recipes" / "conf"


def main() -> None:
    import hydra
    from omegaconf import OmegaConf

    from stalesync.config import Config
    from stalesync.overrides import check_overrides, register

    register()
    groups = [entry.name for entry in CONF.iterdir() if entry.is_dir()]
    try:
        check_overrides(sys.argv[1:], groups)
    except ValueError as error:
        sys.exit(f"error: {error}")

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def run(composed) -> None:
        from stalesync.failures import RunFailed
        from stalesync.launch import launch

        config = OmegaConf.to_object(composed)
        assert isinstance(config, Config)
        try:
            launch(config)
        except (ValueError, RunFailed) as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt:
            sys.exit(130)

    run()


if __name__ == "__main__":
    main()
