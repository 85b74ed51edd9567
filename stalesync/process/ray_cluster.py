"""Start Ray on this machine for a run, or join a cluster, which only processes with its token can call.

A call of Ray executes code. A Ray that a run starts listens on loopback only, and its calls carry a token, since the
other users of the machine reach loopback, too. A cluster is joined only if it refuses callers without a token."""

import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from stalesync.process.failures import ClusterOpen, RayNotStarted, RunFailed, TokenRefused
from stalesync.process.garbage import ARENAS
from stalesync.process.process_log import stderr_to
from stalesync.process.ray_folder import EXPOSED, exposed
from stalesync.process.ray_guard import GIVING_UP, LEAVING, STARTED, Guard, Report, guarded, marking
from stalesync.process.ray_processes import NAMES, RayProcesses, watching_end, watching_start
from stalesync.process.stopping import (
    describe_stop,
    held_too_long,
    keeping_handlers,
    leave,
    raise_in_main,
    restoring_handlers,
)

ShowReport = Callable[[str], None]
"""Shows the report of a run, given its outcome"""
LOOPBACK_S, WARN_EVERY_S = 10.0, 30.0
"""Seconds in which a connection to this host is made, and after which a start that takes long says so"""


@contextmanager
def ray_cluster(
    address: str | None,
    log: Path | None = None,
    queue_roots: Sequence[Path | str] = (),
    report: Report | None = None,
    show_report: ShowReport = lambda outcome: None,
) -> Iterator[Callable[[], None]]:
    """Join the cluster at ``address``, or start Ray on this machine (None); at the block's end leave the cluster, or
    stop Ray, also if this process is killed. Do nothing where Ray is initialised already. Yield a health check of the
    Ray that was started. ``log``: to which what Ray's C++ writes to the standard error while it starts is appended:
    warnings, and the stack where it fails; None: nowhere else; ``queue_roots``: folders in which queues have folders:
    those of dead queues are removed when the Ray that was started here has ended; ``report``: records an error and
    writes it to a descriptor, where a process of Ray has ended and this process has to end without an exception: called
    from another thread, while Ray starts or when the block does not end, or by the guard, where Ray's C++ ends this
    process; None: the error is raised when Ray gives up itself, which takes a minute; ``show_report``: called with the
    outcome from another thread before this process ends at once: after ``report``, or by a signal, for whose handling
    the start of Ray takes too long. Raise ValueError if RAY_TMPDIR cannot have Ray's folder (`ray_folder.py`),
    RunFailed if Ray did not start, or the cluster cannot be joined, needs no token, or refuses that of this process."""
    set_environment(address)
    check_token(address)
    import ray

    if ray.is_initialized():
        yield lambda: None
        return
    if address is not None:
        with _shutting_down():
            joining = Ender(None, None, show_report).watching_start()
            with keeping_handlers(), joining, stderr_to(log):
                _check_admitted(address)
                _initialise(address, address=address)
            node: Any = ray._private.worker.global_worker.node
            if how := exposed(Path(node.get_session_dir_path())):
                logger.warning(EXPOSED, "this host", how)
            yield lambda: None
        return
    with guarded(queue_roots, report) as guard, ExitStack() as watched, _shutting_down():
        ender = Ender(guard, report, show_report)
        try:
            with keeping_handlers(), ender.watching_start(), stderr_to(log), marking(guard.mark, guard.folder):
                _start()
            guard.send(STARTED)
            processes = watched.enter_context(closing(RayProcesses(complete=True)))
            if report is not None:
                watched.enter_context(watching_end(processes, ender.interrupt, ender.give_up))
            try:
                yield processes.check
            finally:
                ender.shuts_down = True
                if processes.ended() is None:
                    watched.close()  # the shutdown ends them
                else:  # the shutdown may wait for long
                    guard.ends_itself = False
        finally:
            guard.send(LEAVING)


@contextmanager
def _shutting_down() -> Iterator[None]:
    """Shut Ray down at the block's end, also where it has not started as a whole."""
    import ray

    try:
        yield
    finally:
        with restoring_handlers() as restore:
            _call_before_processes_end(restore)
            ray.shutdown()


def _call_before_processes_end(call: Callable[[], None]) -> None:
    """Have `ray.shutdown` call a function when its C++ is done, before it ends Ray's processes, which takes seconds."""
    import ray

    node: Any = ray._private.worker._global_node
    if node is not None:
        end_processes = node.kill_all_processes

        def kill_all_processes(*args: Any, **options: Any) -> None:
            call()
            end_processes(*args, **options)

        node.kill_all_processes = kill_all_processes


def set_environment(address: str | None) -> None:
    """Set what Ray reads from the environment when it is imported, and what its processes read; keep the user's
    settings. Where Ray has been imported already, it reads them again."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray starts workers at niceness 15: on a busy core they get about 3 % of the CPU time.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if address is None:
        # Whatever its name says, on any system Ray then uses 127.0.0.1 in place of the machine's address.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    if "ray" in sys.modules:
        _read_environment_again()


def _read_environment_again() -> None:
    """Otherwise this process would send no token, which its own GCS refuses, and listen on the machine's address."""
    import ray
    from ray._private import ray_constants

    if not ray.is_initialized():
        compiled: Any = ray._raylet
        compiled.Config.initialize("")
        ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(
            ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, not ray_constants.IS_WINDOWS_OR_OSX
        )


def check_token(address: str | None) -> None:
    """Raise ClusterOpen if there is no token for the cluster at ``address``, if there is a cluster."""
    if address is not None and not has_token(os.environ, Path.home()):
        raise ClusterOpen(address)


def _check_admitted(address: str) -> None:
    """Call the cluster without a token and with that of this process, once: Ray itself would call again for minutes.
    Raise ClusterOpen if the cluster accepts callers without a token, unless the user has chosen so, TokenRefused if the
    cluster does not accept the token of this process, RayNotStarted if the cluster does not answer."""
    import ray

    try:
        if _uses_token(os.environ):
            with _without_token():
                if _admits(address):
                    raise ClusterOpen(address)
        if not _admits(address):
            raise TokenRefused(address)
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise RayNotStarted(address, error) from error


def _admits(address: str) -> bool:
    """Whether the cluster answers to this process as its settings are now."""
    import ray
    from ray._private import services

    compiled: Any = ray._raylet
    try:
        compiled.GcsClient(address=services.canonicalize_bootstrap_address_or_die(address))
    except ray.exceptions.AuthenticationError:
        return False
    return True


@contextmanager
def _without_token() -> Iterator[None]:
    """Let this process call Ray without its token inside the block."""
    mode = os.environ["RAY_AUTH_MODE"]
    try:
        os.environ["RAY_AUTH_MODE"] = "disabled"
        _read_environment_again()
        yield
    finally:
        os.environ["RAY_AUTH_MODE"] = mode
        _read_environment_again()


def has_token(environment: Mapping[str, str], home: Path) -> bool:
    """Whether Ray has a token for a cluster, or the user has chosen to do without (RAY_AUTH_MODE=disabled)."""
    return not _uses_token(environment) or _given(environment) or token_file(home).is_file()


def _uses_token(environment: Mapping[str, str]) -> bool:
    return environment.get("RAY_AUTH_MODE", "").lower() != "disabled"


def keep_token(environment: Mapping[str, str], home: Path) -> None:
    """Create the token of a user who has none where Ray looks for it (`ray get-auth-token`), readable by that user
    only: Ray would let others read it. Raise OSError if it cannot be written."""
    path = token_file(home)
    if _given(environment):
        return
    path.parent.mkdir(mode=0o700, exist_ok=True)
    # Under its name it appears whole: another run may look for it now, and the disk may be full.
    whole = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(secrets.token_hex(32))
        os.link(whole, path)
    except FileExistsError:
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
    finally:
        whole.unlink(missing_ok=True)


def token_file(home: Path) -> Path:
    """Return the file in which Ray looks for the token of a user."""
    return home / ".ray" / "auth_token"


def _given(environment: Mapping[str, str]) -> bool:
    return bool({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & environment.keys())


def check_loopback() -> None:
    """Raise RunFailed where no connection reaches 127.0.0.1: Ray would wait for it, for minutes."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=LOOPBACK_S).close()
    except OSError as error:
        message = f"this host does not reach itself at 127.0.0.1 ({error}), which Ray needs: ip link set lo up"
        raise RunFailed(message) from error


def _start() -> None:
    check_loopback()
    try:
        keep_token(os.environ, Path.home())
    except OSError:  # no home to write to: only this run's processes have the token
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Without an address Ray would join a cluster that already runs on this machine.
    with bounding_memory():
        _initialise(None, address="local", include_dashboard=False, num_cpus=max(2, os.cpu_count() or 1))


@contextmanager
def bounding_memory() -> Iterator[None]:
    """Let the processes that start inside the block share arenas, and keep no record of calls: Ray's GCS would keep the
    last 100,000, some 2 KB each, for a dashboard that is not started. Keeps the user's settings; on a cluster that is
    joined, `ray start` has the same (docs/stalesync.md)."""
    bounds = {"MALLOC_ARENA_MAX": str(ARENAS), "RAY_task_events_report_interval_ms": "0"}
    added = {name: value for name, value in bounds.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _initialise(cluster: str | None, **options: Any) -> None:
    import ray

    try:
        ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
    except Exception as error:  # Ray raises many types, some of them plain `Exception`
        raise RayNotStarted(cluster, error) from error


class Ender:
    """End this process at once, with a report, where its main thread waits in Ray and cannot. Ray would wait for a
    minute, and then end the process without a report. Its guard and those of the rewards end what is left. Called by
    the threads that watch Ray. ``guard``: of a Ray that was started here; ``report`` records an error;
    ``show_report`` is called after that."""

    def __init__(self, guard: Guard | None, report: Report | None, show_report: ShowReport) -> None:
        self._guard, self._report, self._show_report = guard, report, show_report
        self._stderr = 2
        self.shuts_down = False
        """The main thread is not to be interrupted any more"""
        self._begun_s = self._warned_s = 0.0
        """When the start began, and its seconds at the last warning"""

    def interrupt(self, error: RunFailed) -> None:
        """Interrupt the main thread, which raises the error."""
        if not self.shuts_down:
            raise_in_main(error)

    def give_up(self, error: RunFailed) -> NoReturn:
        """Report the error and end this process."""
        assert self._guard is not None and self._report is not None
        self._guard.send(GIVING_UP)
        try:
            self._report(error, self._stderr)
            self._show_report("failed")
        finally:
            os._exit(1)

    @contextmanager
    def watching_start(self) -> Iterator[None]:
        """End this process when a signal has waited too long for the end of the block, which starts Ray or joins a
        cluster, or if an error can be reported, when a process of Ray has ended inside it."""
        self._stderr = os.dup(2)  # inside the block, 2 becomes the log of Ray's start
        self._begun_s, self._warned_s = time.monotonic(), 0.0
        try:
            with watching_start(self.give_up, NAMES if self._report else (), poll=self._look):
                yield
        finally:
            os.close(self._stderr)
            self._stderr = 2

    def _look(self) -> None:
        waited_s = time.monotonic() - self._begun_s
        if waited_s > self._warned_s + WARN_EVERY_S:
            self._warned_s = waited_s
            os.write(
                self._stderr, f"waiting for Ray to start, or for its cluster to answer: {waited_s:.0f} s\n".encode()
            )
        if (stop := held_too_long()) is not None:
            if self._guard is not None:
                self._guard.send(GIVING_UP)
            os.dup2(self._stderr, 2)
            try:
                self._show_report(describe_stop(stop))
            finally:
                leave(stop)


logger = logging.getLogger(__name__)
