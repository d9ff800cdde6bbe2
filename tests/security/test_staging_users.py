"""Staging on a node with other users.

No file of other users is read, and no file becomes more readable. A group shares only what its
members may read anyway.
"""

import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import sets
import users
from users import ATTACKER, GROUP, MEMBER, VICTIM

from paceline.data import Shards, pack
from paceline.data.staging.staged_sets import VARIABLE, staged_path
from paceline.security.files import UnsafeFileError
from paceline.security.folders import Folder

READ = """
import sys
from paceline.data import Shards
s = Shards(sys.argv[1])
print(sorted(int(s[i][0][0]) for i in range(len(s))) == list(range(len(s))))
"""


@pytest.fixture
def place():
    """Create a folder that all users can write to, as /dev/shm is."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-users-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def packed(place):
    """Pack a dataset of the victim's in a folder that only the victim can enter."""
    return packed_for(place, VICTIM, 0o700, 0o600)


def packed_for(place, user, folder_mode, file_mode, group=None):
    x, y = sets.arrays(60, (50,))
    pack((x, y), place / "set", shard_bytes=2000)
    shutil.rmtree(place / "set" / ".packing", ignore_errors=True)
    for path in (place / "set").iterdir():
        os.chown(path, user, group or user)
        path.chmod(file_mode)
    return users.folder(place / "set", user, folder_mode, group)


def stage(user, *words, groups=()):
    return users.run(user, sys.executable, "-m", "paceline", "stage", *words, groups=groups)


def read(user, packed, root, groups=()):
    code = f"import os; os.environ['PACELINE_STAGE'] = {str(root)!r}\n{READ}"
    return users.run(user, sys.executable, "-c", code, packed, groups=groups)


def test_staging_folder_of_another_user_is_not_used(packed, place):
    name = f"paceline-stage-{VICTIM}"
    bait = users.folder(place / name, ATTACKER, 0o777)
    done = stage(VICTIM, packed, place)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert f"{place}/{name}: belongs to user {ATTACKER}. HINT: choose another ROOT" in said
    assert os.listdir(bait) == []
    # A complete dataset with other samples, under the expected name.
    forged = bait / staged_path(packed, place).name
    x, y = sets.arrays(60, (50,), seed=3)
    pack((x + 500, y), forged, shard_bytes=2000)
    forged.chmod(0o777)
    done = read(VICTIM, packed, place)
    assert done.stdout == "True\n", done.stderr
    assert f"{place}/{name} belongs to user {ATTACKER}. It is not used" in done.stderr


def test_old_common_staging_folder_is_not_used(packed, place):
    users.folder(place / "paceline-stage", ATTACKER, 0o777)
    assert stage(VICTIM, packed, place).returncode == 0
    assert os.listdir(place / "paceline-stage") == []


def test_staged_files_keep_restricted_permissions(packed, place):
    done = stage(VICTIM, packed, place)
    assert done.returncode == 0, done.stderr
    root = place / f"paceline-stage-{VICTIM}"
    (folder,) = root.glob("set-*")
    assert [stat.S_IMODE(one.stat().st_mode) for one in (root, folder)] == [0o700, 0o700]
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert users.run(ATTACKER, "cat", folder / "shard-00000.bin").returncode != 0
    assert read(VICTIM, packed, place).stdout == "True\n"


def test_two_users_stage_to_same_root(place):
    packed = packed_for(place, VICTIM, 0o755, 0o644)
    for user in (VICTIM, ATTACKER):
        done = stage(user, packed, place)
        assert done.returncode == 0, done.stderr
        assert read(user, packed, place).stdout == "True\n"
    assert len(list(place.glob("paceline-stage-*"))) == 2


def test_shared_staging_is_readable_only_by_group(place):
    packed = packed_for(place, VICTIM, 0o750, 0o640, GROUP)
    done = stage(VICTIM, "--shared", packed, place, groups=[GROUP])
    assert done.returncode == 0, done.stderr
    (folder,) = (place / f"paceline-stage-group-{GROUP}").glob("set-*")
    for path in (folder.parent, folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o2770
    assert stat.S_IMODE((folder / "shard-00000.bin").stat().st_mode) == 0o640
    again = stage(MEMBER, "--shared", "--json", packed, place, groups=[GROUP])
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["copied"] == 0
    for user in (VICTIM, MEMBER):
        for shard in packed.glob("shard-*"):  # the origin is not read
            shard.write_bytes(bytes(shard.stat().st_size))
        assert read(user, packed, place, groups=[GROUP]).stdout == "True\n"
    assert users.run(ATTACKER, "ls", folder).returncode != 0
    assert stage(ATTACKER, "--shared", packed, place).returncode != 0


def test_dataset_unreadable_by_group_is_not_shared(place):
    packed = packed_for(place, VICTIM, 0o750, 0o640, GROUP)
    (packed / "shard-00001.bin").chmod(0o600)
    done = stage(VICTIM, "--shared", packed, place, groups=[GROUP])
    assert done.returncode == 2
    assert "shard-00001.bin. HINT: chmod g+r, or leave out --shared" in " ".join(
        done.stderr.split()
    )
    assert not list(place.glob("paceline-stage*"))


def test_shared_sample_is_checked_against_checksum_of_origin(place, monkeypatch):
    """The member has changed the index of the staged copy as well."""
    x, y = sets.arrays(60, (50,))
    pack((x, y), place / "set", shard_bytes=2000)
    other = place / "other" / "set"
    pack((x + 500, y), other, shard_bytes=2000)
    from paceline.data.staging import stage as staging

    group = (place / "set").stat().st_gid
    (place / "near").mkdir()
    folder = staging.stage(place / "set", place / "near", shared=True).folder
    for path in other.iterdir():
        if path.name.startswith(("shard", "index")):
            shutil.copyfile(path, folder / path.name)
    monkeypatch.setenv(VARIABLE, str(place / "near"))
    one = Shards(place / "set")
    assert one._staged is not None
    assert one._staged.group == group
    with pytest.raises(ValueError, match="a byte has changed"):
        one[0]


def test_link_in_dataset_is_not_shared(place):
    """The author of a dataset links a file that the group cannot read."""
    packed = packed_for(place, MEMBER, 0o750, 0o640, GROUP)
    private = users.folder(place / "private", VICTIM)
    (private / "secret").write_bytes((packed / "index.bin").read_bytes())
    (private / "secret").chmod(0o644)
    (packed / "index.bin").unlink()
    (packed / "index.bin").symlink_to(private / "secret")
    done = stage(VICTIM, "--shared", packed, place, groups=[GROUP])
    assert done.returncode == 2
    assert "index.bin is a symbolic link. HINT: leave out --shared" in " ".join(done.stderr.split())
    assert not list(place.glob("paceline-stage*"))


def test_access_control_list_is_respected_for_shared_staging(place):
    packed = packed_for(place, VICTIM, 0o750, 0o640, GROUP)
    shard = packed / "shard-00001.bin"
    nobody = 0xFFFFFFFF
    entries = [(1, 6, nobody), (2, 4, MEMBER + 1), (4, 0, nobody), (16, 4, nobody), (32, 0, nobody)]
    raw = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *one) for one in entries)
    os.setxattr(shard, "system.posix_acl_access", raw)  # setfacl -m u:...:r,g::-
    assert shard.stat().st_mode & 0o040  # the group bits show the ACL mask
    done = stage(VICTIM, "--shared", packed, place, groups=[GROUP])
    assert "can't read" in done.stderr


@pytest.mark.parametrize("closed", [True, False])
def test_root_inaccessible_to_group_is_reported(place, closed):
    packed = packed_for(place, VICTIM, 0o750, 0o640, GROUP)
    root = place / "near"
    if closed:
        users.folder(root, VICTIM)
    done = stage(VICTIM, "--shared", packed, root, groups=[GROUP])
    said = " ".join(done.stderr.split())
    assert done.returncode == 2
    assert ("can't enter" if closed else "does not exist") in said


def test_staged_dataset_on_read_only_mount_is_read(place, monkeypatch):
    users.need(users.missing())
    from paceline.data.staging import stage as staging

    x, y = sets.arrays(60, (50,))
    pack((x, y), place / "set", shard_bytes=2000)
    folder = staging.stage(place / "set", place / "near").folder
    monkeypatch.setenv(VARIABLE, str(place / "near"))
    subprocess.run(["mount", "--bind", "-o", "ro", folder.parent, folder.parent], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder.parent], check=True)
    try:
        assert Shards(place / "set")._staged is not None
    finally:
        subprocess.run(["umount", "-l", folder.parent], check=True)


def test_shared_shard_replaced_by_fifo_is_read_from_origin(place, monkeypatch):
    from paceline.data.staging import stage as staging

    x, y = sets.arrays(60, (50,))
    pack((x, y), place / "set", shard_bytes=2000)
    (place / "near").mkdir()
    folder = staging.stage(place / "set", place / "near", shared=True).folder
    (folder / "shard-00000.bin").unlink()
    os.mkfifo(folder / "shard-00000.bin")
    (folder / "shard-00001.bin").unlink()  # as if partly staged
    monkeypatch.setenv(VARIABLE, str(place / "near"))
    one = Shards(place / "set")
    assert len([one[i] for i in range(60)]) == 60
    assert [one.shard_path(shard).parent == folder for shard in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("mode", "user", "why"),
    [
        (0o755, 0, "is open to other users"),
        (0o700, ATTACKER, f"belongs to user {ATTACKER}"),
        (None, 0, "is a symbolic link"),
    ],
)
def test_folder_with_wrong_owner_or_mode_is_rejected(tmp_path, mode, user, why):
    if user:
        users.need(users.missing())
    path = tmp_path / "folder"
    if mode is None:
        (tmp_path / "real").mkdir(0o700)
        path.symlink_to(tmp_path / "real")
    else:
        path.mkdir()
        path.chmod(mode)
        os.chown(path, user or os.geteuid(), -1)
    with pytest.raises(UnsafeFileError, match=why):
        Folder.open(path)


def test_folder_operations_do_not_follow_links(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    with Folder.make(tmp_path / "folder") as folder:
        (folder.path / "link").symlink_to(outside / "kept")
        (folder.path / "inner").mkdir()
        (folder.path / "inner" / "link").symlink_to(outside)
        os.mkfifo(folder.path / "fifo")
        for name in ("link", "fifo", "inner"):
            with pytest.raises(UnsafeFileError):
                folder.open_file(name)
        for name in ("../outside", "", "..", "a/b"):
            with pytest.raises(UnsafeFileError, match="plain file name"):
                folder.open_file(name)
        folder.write("link", b"new")  # replaces the link
        with pytest.raises(ZeroDivisionError), folder.replacing("half"):
            raise ZeroDivisionError
        assert folder.names() == ["fifo", "inner", "link"]
        assert folder.read("link", 10) == b"new"
        folder.remove_all()
    assert not (tmp_path / "folder").exists()
    assert (outside / "kept").read_text() == "kept"
