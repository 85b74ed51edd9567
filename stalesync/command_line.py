"""Run a job for a script of `scripts/`: report how it ended on the standard error, and by the exit status."""

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fusion.telemetry.files import FULL
from stalesync.process.stopping import describe_stop, exit_status

if TYPE_CHECKING:
    from stalesync.job.config import Config


def run_job(config: "Config", *, evaluates: str = "", step: int = 0) -> Path:
    """Run a job whose config is valid to its end; return its folder. End the process if the job fails (exit status
    1) or is stopped by a signal. ``evaluates``, ``step``: as of `launch`."""
    from stalesync.process.ray_cluster import set_environment

    set_environment(config.cluster.address)
    from stalesync.launch import launch
    from stalesync.process.failures import RunFailed

    try:
        return launch(config, evaluates=evaluates, step=step)
    except (ValueError, RunFailed) as error:
        fail(f"error: {error}", error)
    except KeyboardInterrupt as stop:
        print(describe_stop(stop), file=sys.stderr)
        sys.exit(exit_status(stop))
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            fail(f"error: {error}; free space there, or set run.dir to another disk", error)
        fail("".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip(), error)


def fail(text: str, error: Exception) -> NoReturn:
    """End the process: the text on stderr, and in its last line where the run's log is; exit status 1."""
    notes = [note for note in getattr(error, "__notes__", ()) if note not in text]
    print(text, *notes, sep="\n", file=sys.stderr)
    sys.exit(1)


def refuse(usage: str, error: ValueError) -> NoReturn:
    """End the process as for any wrong argument: usage and error on stderr, exit status 2."""
    print(usage, f"error: {error}", sep="\n", file=sys.stderr)
    sys.exit(2)
