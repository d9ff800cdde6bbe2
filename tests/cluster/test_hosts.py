"""Hosts that the user lists in an option or a hostfile."""

import pytest

from paceline.cluster.schedulers.hostfile import Host, parse_hosts, read_hostfile


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("host1:4,host2", [Host("host1", 4), Host("host2")]),
        ("a,b,a", [Host("a", 2), Host("b")]),  # as mpirun counts them
        ("a:4,b:1,a", [Host("a", 5), Host("b", 1)]),
        ("10.0.0.1:2, me@n-1.site:3", [Host("10.0.0.1", 2), Host("me@n-1.site", 3)]),
        ("[::1]:4,[fe80::2%eth0]", [Host("::1", 4), Host("fe80::2%eth0")]),
    ],
)
def test_hosts_option_is_parsed(text, hosts):
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "name is empty"),
        ("a,,b", "name is empty"),
        (":4", "name is empty"),
        ("a:", "slots are not a number above 0"),
        ("a:0", "'0' slots are not a number above 0"),
        ("a:-1", "slots are not a number"),
        ("a:four", "'four' slots"),
        ("-oProxyCommand=x", "looks like an option"),
        ("a@-b", "is not a host name"),
        ("-a@b", "looks like an option"),
        ("a b:4", "is not a host name"),
        ("a;reboot", "is not a host name"),
        ("$(x)@b", "is not a user name"),
        ("n[1-3]:4", "is not a host name"),
        ("::1", "HINT: write an IPv6 address in brackets"),
        ("[::1:4", "is not an IPv6 address"),
        ("[::1]4", "is not an IPv6 address"),
        ("[fe80::1%a;b]", "is not an IPv6 address"),
    ],
)
def test_invalid_hosts_option_is_rejected_with_hint(text, what):
    with pytest.raises(ValueError, match="HINT") as said:
        parse_hosts(text)
    assert what in str(said.value)
    assert f"-H {text!r}" in str(said.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("host1 slots=4\nhost2 slots=4 max_slots=8\n", [Host("host1", 4), Host("host2", 4)]),
        ("host1 slots = 4", [Host("host1", 4)]),  # Open MPI accepts spaces as well
        ("host1:4\nhost2:2", [Host("host1", 4), Host("host2", 2)]),
        ("# of today\n\nhost1  # the big one\nhost2\r\n", [Host("host1"), Host("host2")]),
        ("n1\nn1\nn2\nn2\nn2\n", [Host("n1", 2), Host("n2", 3)]),
        ("\ufeffhost1\n", [Host("host1")]),
    ],
)
def test_hostfile_formats_of_common_launchers(tmp_path, text, hosts):
    (tmp_path / "hosts").write_text(text)
    assert read_hostfile(tmp_path / "hosts") == hosts


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a\nb slots=x", "line 2: 'b slots=x': 'x' slots are not a number above 0"),
        ("a\n\n# c\nb gpus=2", "line 4: 'b gpus=2': 'gpus=2' is not understood"),
        ("a 4", "line 1: 'a 4': '4' is not understood. HINT: host1 slots=4"),
        ("a:4 slots=4", "the slots are given twice"),
        ("--all", "line 1: '--all': '--all' looks like an option"),
        ("# nobody\n\n", "names no host"),
    ],
)
def test_invalid_hostfile_is_rejected_with_line(tmp_path, text, what):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ValueError, match="HINT") as said:
        read_hostfile(tmp_path / "hosts")
    assert what in str(said.value)
    assert str(tmp_path / "hosts") in str(said.value)


def test_unreadable_hostfile_is_rejected(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, what in (("gone", "No such file"), ("binary", "not text"), ("", "directory")):
        with pytest.raises(ValueError, match=f"{what}.*HINT"):
            read_hostfile(tmp_path / name)
