"""The store of a rank that runs alone: it has what this rank has written, and never waits."""

from datetime import timedelta

from torch._C._distributed_c10d import Store


class RehearsalLimitError(RuntimeError):
    """The rehearsal can't go on, which says nothing about the ranks of the job."""


# C++ keeps its part of a store only, and does not find the methods of a collected object.
_alive: list["LoneStore"] = []


class LoneStore(Store):
    """A store in this process. C++ calls the methods by these names."""

    def __init__(self) -> None:
        super().__init__()
        _alive.append(self)
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        now = self._values.get(key, b"")
        expected, desired = (
            one.encode() if isinstance(one, str) else bytes(one)
            for one in (expected_value, desired_value)
        )
        if now == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        missing = [key for key in keys if key not in self._values]
        if missing:
            raise RehearsalLimitError(
                f"this rank waits for {missing[0]!r} in the store, which another rank sets. A "
                "rehearsed rank runs alone. HINT: exchange it by a collective, such as "
                "dist.broadcast"
            )

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    deleteKey = delete_key  # noqa: N815

    def num_keys(self) -> int:
        return len(self._values)

    getNumKeys = num_keys  # noqa: N815
