"""Ray's files are where no other user can change them."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from stalesync.process.ray_folder import LONGEST_BELOW, RAY, SOCKET_BYTES, exposed, ray_folder, remove, root_of

STRANGER = 65533
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")


@pytest.fixture
def root(monkeypatch):
    """A short path, as sockets are below it."""
    folder = Path(tempfile.mkdtemp(prefix="f-", dir="/tmp"))
    folder.chmod(0o755)
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


def test_a_run_has_a_new_folder_of_its_own_that_only_its_user_may_enter(root):
    old_mask = os.umask(0)
    try:
        with ray_folder() as one, ray_folder() as other:
            for folder in (one, other):
                about = folder.lstat()
                assert folder.parent == root and (about.st_mode & 0o777, about.st_uid) == (0o700, os.getuid())
            assert one != other
    finally:
        os.umask(old_mask)
    assert not [*root.iterdir()]


def test_the_longest_socket_fits_below_the_longest_root(root):
    longest = SOCKET_BYTES - len(LONGEST_BELOW) - 1
    fits = root / ("x" * (longest - len(str(root)) - 1))
    for folder in (fits, longer := fits.with_name(fits.name + "x")):
        folder.mkdir()
    assert root_of({"RAY_TMPDIR": str(fits)}) == fits and len(f"{fits}/{LONGEST_BELOW}") == SOCKET_BYTES
    with pytest.raises(ValueError, match=f"^RAY_TMPDIR={longer}: longer than the {longest} bytes that"):
        root_of({"RAY_TMPDIR": str(longer)})
    assert root_of({"TMPDIR": str(longer)}) == Path("/tmp"), "a folder that the user did not name for Ray"


@pytest.mark.parametrize(
    ("mode", "owner", "refused"),
    [
        (0o700, None, ""),
        (0o755, None, ""),
        (0o1777, None, ""),
        (0o777, None, "other users may write to {} (mode 0777)"),
        (0o770, None, "other users may write to {} (mode 0770)"),
        pytest.param(0o700, STRANGER, "{} belongs to the user 65533", marks=as_root),
        pytest.param(0o1777, STRANGER, "{} belongs to the user 65533", marks=as_root),
    ],
)
def test_a_folder_that_another_user_could_replace_is_refused(root, mode, owner, refused):
    (folder := root / "a").mkdir()
    (below := folder / "b").mkdir()
    folder.chmod(mode)
    below.chmod(0o755)
    if owner is not None:
        os.chown(folder, owner, owner)
    assert exposed(below) == refused.format(folder)
    if refused:
        with pytest.raises(ValueError, match="^RAY_TMPDIR=.*; set RAY_TMPDIR to a short path that only you"):
            root_of({"RAY_TMPDIR": str(below)})


@as_root
def test_a_link_that_another_user_has_planted_is_not_followed(root):
    (target := root / "t").mkdir(mode=0o700)
    (link := root / "l").symlink_to(target)
    assert root_of({"RAY_TMPDIR": str(link)}) == target, "the user's own"
    os.lchown(link, STRANGER, STRANGER)
    for named in (link, link / "below"):
        named.mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=f"{link} belongs to the user {STRANGER}"):
            root_of({"RAY_TMPDIR": str(named)})


def test_a_folder_below_one_that_keeps_others_out_may_have_any_mode(root):
    (session := root / "private" / RAY).mkdir(parents=True)
    session.chmod(0o777)
    (root / "private").chmod(0o755)
    assert exposed(session) == f"other users may write to {session} (mode 0777)"
    (root / "private").chmod(0o700)
    assert exposed(session) == ""
    root.chmod(0o777)
    assert exposed(session) == f"other users may write to {root} (mode 0777)", "the private folder can be replaced"


KILLED = """
import os, signal
from stalesync.process.ray_folder import ray_folder
with ray_folder() as folder:
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_of_a_run_that_was_killed_is_removed_later_and_no_other(root):
    (foreign := root / "ray-data").mkdir()
    with ray_folder() as running:
        killed = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
        left = Path(killed.stdout.strip())
        assert killed.returncode == -signal.SIGKILL and left.is_dir() and left.parent == root
        with ray_folder() as folder:
            remove(folder)
        assert {*root.iterdir()} == {foreign, running}


def test_logs_of_a_ray_that_failed_are_kept_and_its_links_are_not_followed(root, tmp_path):
    with ray_folder() as folder:
        (logs := folder / RAY / "session_2026" / "logs").mkdir(parents=True)
        (folder / RAY / "session_latest").symlink_to(logs.parent)
        (logs / "raylet.err").write_text("why")
        (secret := root / "secret").write_text("private")
        (logs / "planted").symlink_to(secret)
        remove(folder, keep_logs_in=tmp_path)
        assert not folder.exists()
    assert {path.name: path.read_text() for path in (tmp_path / "logs" / "ray").iterdir()} == {"raylet.err": "why"}
