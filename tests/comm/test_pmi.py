"""The PMI 1 client for the store of MPICH's mpiexec, Intel MPI and Flux, with a test server."""

import socket
import threading

import pytest

from paceline.comm.rendezvous import Pmi, from_rank_0


class Server:
    """The server side of the PMI 1 wire protocol, as in mpiexec.

    Each rank has a socket; all ranks share a store and barriers.
    """

    def __init__(self, size):
        self.store = {}
        self.heard = [[] for _ in range(size)]  # commands of each rank
        self._all = threading.Barrier(size)
        pairs = [socket.socketpair() for _ in range(size)]
        self.ends = [theirs for _, theirs in pairs]
        self._threads = [
            threading.Thread(target=self._serve, args=(rank, ours), daemon=True)
            for rank, (ours, _) in enumerate(pairs)
        ]
        for thread in self._threads:
            thread.start()

    def environment(self, rank):
        return {"PMI_FD": str(self.ends[rank].fileno()), "PMI_RANK": str(rank)}

    def close(self):
        for end in self.ends:
            end.close()
        for thread in self._threads:
            thread.join(5.0)

    def _serve(self, rank, connection):
        with connection, connection.makefile("r") as lines:
            for line in lines:
                said = dict(word.split("=", 1) for word in line.split())
                self.heard[rank].append(said["cmd"])
                answer = self._answer(said).encode() + b"\n"
                connection.sendall(answer[:5])  # in two pieces, because a pipe may split it
                connection.sendall(answer[5:])

    def _answer(self, said):
        if said["cmd"] == "init":
            assert said["pmi_version"] == "1"
            return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
        if said["cmd"] == "get_my_kvsname":
            return "cmd=my_kvsname kvsname=kvs_4_0"
        if said["cmd"] == "barrier_in":
            self._all.wait(5.0)
            return "cmd=barrier_out"
        if said["cmd"] == "finalize":
            return "cmd=finalize_ack"
        assert said["kvsname"] == "kvs_4_0"
        if said["cmd"] == "put":
            self.store[said["key"]] = said["value"]
            return "cmd=put_result rc=0 msg=success"
        if said["key"] in self.store:
            return f"cmd=get_result rc=0 msg=success value={self.store[said['key']]}"
        return "cmd=get_result rc=-1 msg=key_not_found value=unknown"


@pytest.fixture
def server():
    made = []

    def make(size):
        made.append(Server(size))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_value_from_rank_0_reaches_all_ranks(server):
    launcher = server(3)
    found = {}

    def rank(number):
        found[number] = from_rank_0(
            launcher.environment(number), number, "paceline", f"10.0.0.{number};{number}=key"
        )

    threads = [threading.Thread(target=rank, args=(number,)) for number in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert found == dict.fromkeys(range(3), "10.0.0.0;0=key")
    assert launcher.store == {"paceline": "10.0.0.0;0=key"}
    # mpiexec treats a process that exits without "finalize" as crashed.
    assert [commands[-1] for commands in launcher.heard] == ["finalize"] * 3


def test_pmi_error_is_reported_with_server_response(server):
    launcher = server(1)
    pmi = Pmi(launcher.environment(0))
    with pytest.raises(
        ValueError, match=r"PMI_FD=\d+: the launcher answered get with .*'rc': '-1'.*not_found"
    ):
        pmi.get("nobody_put_it")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "the launcher has closed the connection"),
        (b"cmd=response_to_init", "the launcher has closed the connection"),  # incomplete line
        (b"cmd=response_to_init rc=-1\n", "the launcher answered init with"),
        (b"cmd=init_ack pmi_version=2\n", "the launcher answered init with"),
        (b"220 smtp ready\n", "the launcher answered init with"),
        (b"\xff\xfe\n", "the launcher answered init with"),
    ],
    ids=["closed", "cut", "refused", "other", "no PMI", "no text"],
)
def test_invalid_pmi_response_is_rejected(answer, said):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(answer)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(ValueError, match=rf"PMI_FD={theirs.fileno()}: {said}"):
            Pmi({"PMI_FD": str(theirs.fileno())})


def test_closed_pmi_descriptor_is_rejected():
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    ours.close()
    theirs.close()
    with pytest.raises(ValueError, match=rf"PMI_FD={number}: Bad file descriptor"):
        Pmi({"PMI_FD": str(number)})
