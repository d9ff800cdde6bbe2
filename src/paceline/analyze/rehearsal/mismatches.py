"""Calls of rehearsed ranks that do not fit together: ranks of a real job would wait or fail."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from ...plurals import counted
from ...record.ring.states import POINT_TO_POINT_OPS, Op
from ..figures.losses import collective_name
from .facts import Call, Members, RankFacts

# Others may get different numbers of bytes from each rank.
_EQUAL_BYTES = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.BROADCAST)


def find_mismatches(ranks: Sequence[RankFacts]) -> list[str]:
    """Return a sentence for each pair of ranks and group whose calls do not fit.

    Ranks that have failed are left out.
    """
    complete = [rank for rank in ranks if rank.failure is None]
    found = []
    for first, second in combinations(complete, 2):
        found += list(_pair(first, second))
    return found


def _pair(first: RankFacts, second: RankFacts) -> Iterator[str]:
    calls, others = collectives_by_group(first), collectives_by_group(second)
    for key in (key for key in calls if key in others):
        if text := _difference(first, calls[key], second, others[key]):
            yield text
    if first.steps != second.steps:
        return  # messages of one more step
    for sender, receiver in ((first, second), (second, first)):
        sent = _messages(sender, Op.SEND, receiver.rank)
        got = _messages(receiver, Op.RECV, sender.rank)
        if sent != got:
            yield (
                f"rank {sender.rank} sends {_amounts(sent)} to rank {receiver.rank}, which "
                f"receives {_amounts(got)} from it"
            )


def collectives_by_group(of: RankFacts) -> dict[tuple[Members, int], list[Call]]:
    """Return the collectives of each group of several ranks, in their order.

    Keys: its ranks, and its number among groups of the same ranks.
    """
    keys, known = list[tuple[Members, int]](), Counter[Members]()
    for group in of.groups:
        keys.append((group.members, known[group.members]))
        known[group.members] += 1
    found: dict[tuple[Members, int], list[Call]] = {key: [] for key in keys if len(key[0]) > 1}
    for call in of.calls:
        if call.op not in POINT_TO_POINT_OPS and keys[call.group] in found:
            found[keys[call.group]].append(call)
    return found


def difference(a: int, call: Call, b: int, other: Call, number: int) -> str:
    """Return in what the calls of two ranks differ, which must be alike; "" for nothing.

    Args:
        a, b: The ranks.
        number: Of the collective in their group, from 1.
    """
    is_equal = (call.op, call.peer) == (other.op, other.peer)
    if call.op in _EQUAL_BYTES:
        is_equal = is_equal and call.bytes == other.bytes
    return "" if is_equal else f"{_number(number)}: {_calls(a, call)}, and {_calls(b, other)}"


def _difference(a: RankFacts, calls: list[Call], b: RankFacts, others: list[Call]) -> str:
    for number, (call, other) in enumerate(zip(calls, others, strict=False), start=1):
        if text := difference(a.rank, call, b.rank, other, number):
            return text
    common = min(len(calls), len(others))
    if len(calls) == len(others):
        return ""
    more, longer, shorter = (calls, a, b) if len(calls) > common else (others, b, a)
    if shorter.steps > longer.steps:
        return ""  # the rehearsal has ended it, while the script of the other one went on
    extra = _calls(longer.rank, more[common])
    return f"{_number(common + 1)}: {extra}, and rank {shorter.rank} does not"


def _number(number: int) -> str:
    return f"collective {number} of their group"


def _calls(rank: int, call: Call) -> str:
    return f"rank {rank} calls {_named(call)}"


def _named(call: Call) -> str:
    root = f" with root {call.peer}" if call.peer >= 0 else ""
    return f"{collective_name(call.op)} of {call.bytes:,} bytes{root} ({call.line})"


def _messages(of: RankFacts, op: Op, peer: int) -> Counter[int]:
    """Return the sizes of the messages to or from another rank."""
    return Counter(
        call.bytes
        for call in of.calls
        if call.op == op
        and 0 <= call.peer < len(of.groups[call.group].members)
        and of.groups[call.group].members[call.peer] == peer
    )


def _amounts(sizes: Counter[int]) -> str:
    count = sum(sizes.values())
    return f"{counted(count, 'message')} of {sum(n * k for n, k in sizes.items()):,} bytes"
