"""Host lists in the formats of the schedulers."""

import pytest

from paceline.cluster.schedulers.hostlist import expand_counts, expand_hostlist, expand_numbers


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("host1", "host1"),
        ("host[1-3,5],n07", "host1 host2 host3 host5 n07"),
        ("n[001-003,12]", "n001 n002 n003 n12"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[09-10]-ib.site", "n09-ib.site n10-ib.site"),
        ("rack[1-2]n[1-2]", "rack1n1 rack1n2 rack2n1 rack2n2"),
        ("b, a[2,1]", "b a2 a1"),  # in the scheduler's order
    ],
)
def test_host_list_is_expanded(text, hosts):
    assert expand_hostlist(text) == hosts.split()


@pytest.mark.parametrize(
    "text",
    [
        *("", "n[1-3", "n1-3]", "n[[1]]", "n[]", "n[1-]", "n[3-1]", "n[a-c]", "a,,b", "a b"),
        *("n[²]", "n[1-999999999]", "a[1-999]b[1-999]"),
    ],
)
def test_invalid_host_list_is_rejected(text):
    with pytest.raises(ValueError, match=r"is not understood: .* HINT: write it as in n") as said:
        expand_hostlist(text)
    assert repr(text) in str(said.value)


def test_repeated_counts_are_expanded():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("72") == [72]
    for text in ("", "2(x)", "2x3", "a", "1(x999999999)"):
        with pytest.raises(ValueError, match="counts"):
            expand_counts(text)


def test_number_ranges_are_expanded():
    assert expand_numbers("3-5,008") == ["3", "4", "5", "008"]
