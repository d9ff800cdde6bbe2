"""The socket that a process runs on, from the user's setting or from sysfs."""

import pytest

from paceline.comm.shared.open_group import SOCKET_VARIABLE, UNKNOWN_SOCKET, socket_of


def test_socket_from_user_setting():
    said = {SOCKET_VARIABLE: "0-3,8-11 4-7,12-15"}
    assert socket_of({0, 8}, said) == 0
    assert socket_of({5}, said) == socket_of({4, 15}, said) == 1
    assert (
        socket_of({3, 4}, said) == socket_of({16}, said) == socket_of(set(), said) == UNKNOWN_SOCKET
    )
    with pytest.raises(
        ValueError, match=r"PACELINE_SOCKETS=0-x is not .* HINT: give a list for each"
    ):
        socket_of({0}, {SOCKET_VARIABLE: "0-x"})


def test_socket_from_sysfs(tmp_path):
    for cpu, package in enumerate([0, 0, 3, 3, -1]):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
    assert socket_of({0, 1}, {}, tmp_path) == 0
    assert socket_of({3}, {}, tmp_path) == 3
    # Two sockets; no information from the kernel; no such hardware thread.
    assert all(
        socket_of(cpus, {}, tmp_path) == UNKNOWN_SOCKET for cpus in ({1, 2}, {4}, {5}, set())
    )
