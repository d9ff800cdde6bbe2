"""The start of a rank in a new interpreter, and the end of one that was forked."""

import errno
import os
import signal
import socket
import subprocess
import sys
import weakref
from types import ModuleType, SimpleNamespace

import pytest

from paceline.cluster.binding_plan import RankBinding
from paceline.launch.ranks import rank_process
from paceline.launch.ranks.fork_server import RankStart
from paceline.launch.ranks.local_host import LocalHost, RankServer
from paceline.record.hooks.error_messages import describe_peer_gone


def test_environment_too_large_for_new_interpreter_is_reported(monkeypatch):
    def refuse(*_):
        raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))

    monkeypatch.setattr(rank_process, "become", lambda start: None)
    monkeypatch.setattr(os, "execv", refuse)
    monkeypatch.setenv("HUGE", "x" * 70_000)
    start = RankStart({}, [], None, (0, 1, 2))
    monkeypatch.setattr(os, "set_inheritable", lambda *_: None)
    with pytest.raises(
        SystemExit, match=r"largest environment variables are HUGE \(70,005 bytes\).*env -u HUGE"
    ):
        rank_process.exec_fresh(start)


def test_rank_server_that_was_killed_before_it_forks_is_reported(tmp_path):
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    theirs.close()
    environment = {"PACELINE_RECORD": str(tmp_path)}
    host = LocalHost(RankServer(pid, mine), environment, [RankBinding([], [])], [{}])
    host.set_output(SimpleNamespace(add_rank=lambda rank, pipes: [os.close(fd) for fd in pipes]))
    host.start(0, 0, {"TORCHELASTIC_RESTART_COUNT": "0"})
    ((rank, code, _),) = host.take_exits()
    assert (rank, code) == (0, -signal.SIGKILL)
    assert f"rank server (process {pid}), from which Paceline forks" in host.exit_reason(0)
    assert "was killed by SIGKILL (signal 9)" in host.exit_reason(0)
    os.waitpid(pid, 0)
    mine.close()


def test_a_short_end_finalizes_what_the_rank_has_made_and_nothing_older(tmp_path, monkeypatch):
    class Noted:
        def __del__(self):
            ended.append(self.name)

    def module(name, folder):
        made = ModuleType(name)
        made.__file__, made.noted = str(folder / f"{name}.py"), Noted()
        made.noted.name = name
        monkeypatch.setitem(sys.modules, name, made)
        return made

    ended, finalizers = [], {one: one.atexit for one in weakref.finalize._registry}
    owner = Noted()
    owner.name = "owner"
    older = weakref.finalize(owner, int)
    kept = [module("imported_by_the_server", tmp_path)]
    try:
        short = rank_process.ShortEnd()
        newer = weakref.finalize(owner, int)
        assert (older.atexit, newer.atexit) == (False, True)
    finally:
        for one, atexit in finalizers.items():
            one.atexit = atexit
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    monkeypatch.setitem(sys.modules, "blocked", None)
    for name in ("__main__", "beside_the_script"):
        module(name, tmp_path)
    kept.append(module("of_a_library", tmp_path / "library"))
    short.drop_script()
    assert sorted(ended) == ["__main__", "beside_the_script"]
    assert all(one.noted for one in kept)


def test_a_short_end_writes_the_files_of_modules_that_it_keeps(tmp_path):
    """A forked rank as in a trial; the module is in a package, and imported after the fork."""
    script = tmp_path / "train.py"
    package = tmp_path / "package"
    package.mkdir()
    (package / "log.py").write_text("file = open('log.txt', 'w')\nfile.write('epoch 1')\n")
    script.write_text("from package import log\n")
    code = f"""
import gc, os, runpy, sys
from paceline.launch.ranks import rank_process
os.chdir({str(tmp_path)!r})
gc.freeze()
pid = os.fork()
if pid == 0:
    short = rank_process.ShortEnd()
    sys.argv = [{str(script)!r}]
    sys.path.insert(0, {str(tmp_path)!r})
    runpy.run_path(sys.argv[0])
    rank_process.finish(0, short)
os.waitpid(pid, 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "log.txt").read_text() == "epoch 1"


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (ConnectionResetError("Connection reset by peer"), None),  # the script's own connection
        (
            RuntimeError("[/a/pair.cc:5] Connection closed by peer [::1]:3. This is typically a"),
            "another rank has ended (Connection closed by peer [::1]:3)",
        ),
        (
            RuntimeError(
                "Got the following error when running the callback: ExchangeError: barrier can't "
                "continue: rank 1 has died\n\nAt:\n  c_kernel.py(220)"
            ),
            "barrier can't continue: rank 1 has died",
        ),
    ],
)
def test_lost_peer_is_one_line(error, gone):
    assert describe_peer_gone(error) == gone
