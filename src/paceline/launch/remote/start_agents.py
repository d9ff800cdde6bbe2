"""Start an agent on each node of a job, and connect to it."""

import itertools
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress

from ...cluster.schedulers.hostlist import expand_numbers
from ...cluster.topology.network_interfaces import is_local_host, network_links
from ...comm.reachable_address import listen_on, of_names, requested_interface
from ...security.handshake import Acceptor
from ...security.processes import program_command, python_command
from ..channel import Channel, channel_of_visitor, host_handshake, new_secret
from .forwarded_env import interpreter_variables, login_variables
from .remote_host import RemoteHost
from .start_commands import LaunchTool

# for an agent's first message; Python may start slowly from a shared file system
START_TIMEOUT_S = 120.0
NOTICE_INTERVAL_S = 10.0  # between two messages about missing hosts
MAX_NAMED_HOSTS = 8  # in a message
# Patterns in the output of ssh and the shells behind it, and explanations.
KNOWN_FAILURES = (
    (
        "resolve hostname|Name or service not known",
        "its name does not resolve. HINT: getent hosts {host}",
    ),
    (
        "Host key verification failed|host key .* (has changed|is not known)|REMOTE HOST IDENT",
        "ssh does not know its host key, or the key has changed. HINT: run `ssh {host}` once",
    ),
    (
        r"Permission denied \(",
        "ssh accepts none of your keys. HINT: `ssh {host}` must work without a password "
        "(ssh-copy-id)",
    ),
    (
        "Connection (timed out|refused)|No route to host|port 22: Connection",
        "ssh can't reach it ({said}). HINT: check that it is up and runs sshd",
    ),
    (
        "No module named .?paceline",
        "{python} has no Paceline. HINT: use the same virtual environment on all nodes",
    ),
    (
        "error while loading shared libraries",
        "{python} does not start on it ({said}). HINT: install the library on that node; "
        "LD_LIBRARY_PATH is forwarded",
    ),
    (
        "{python}.*(not found|No such file or directory)",
        "it has no {python}. HINT: use the same virtual environment on all nodes, at the same path",
    ),
)


# Listener for agents that connect back to the launcher (started by srun, jsrun, mpirun, flux).

PLACE_TIMEOUT_S = 120.0  # timeout from an agent's handshake to the message with its index
POLL_INTERVAL_S = 0.02  # between two polls for that message
RESOLVE_TIMEOUT_S = 5.0  # timeout for resolving the names of all nodes
MIN_REPORTED_STRANGERS = (
    100  # unauthenticated connections that justify a warning in a job that has started
)


class AgentListener:
    """Listening sockets for a job's agents, which authenticate by the secret and send their index.

    One thread serves all connections. A connection without the secret occupies no thread, and is
    closed after a second (``security.handshake``).

    Args:
        names: Names of the nodes from which agents will connect.

    Attributes:
        secret: Secret by which agents authenticate.
        where: The launcher's addresses for agents: ``ADDRESS,PORT;ADDRESS,PORT``.
        found: The agents, by the index that the scheduler's launch tool has assigned to each.
        visitors: All authenticated connections; the caller closes them.
        twice: Index that two agents have sent, or None.
    """

    def __init__(self, names: list[str]) -> None:
        self.secret = new_secret()
        sockets, self.where = _listen(addresses_towards(names))
        self._acceptor = Acceptor(sockets, lambda _: host_handshake(self.secret))
        self._number = len(names)
        self.found: dict[int, RemoteHost] = {}
        self.visitors: list[RemoteHost] = []
        self.twice: int | None = None
        self._unplaced: dict[RemoteHost, float] = {}  # deadline for the index, by agent

    def __enter__(self) -> "AgentListener":
        return self

    def __exit__(self, *_: object) -> None:
        self._acceptor.close()

    def wait(self, seconds: float) -> None:
        """Serve connections for about ``seconds``, then return. Updates ``found`` and ``twice``."""
        wait = min(seconds, POLL_INTERVAL_S) if self._unplaced else seconds
        for visitor, nonces in self._acceptor.wait(wait):
            self._admit(visitor, nonces)
        for host, deadline in list(self._unplaced.items()):
            try:
                answer = host.poll_answer("place")
                if answer is None and time.monotonic() < deadline:
                    continue
                self._unplaced.pop(host)
                self._place(host, answer)
            except ValueError:
                self._unplaced.pop(host, None)
                host.close()

    def strangers(self) -> str:
        """Return a message with the number and origin of unauthenticated connections, or ""."""
        strangers = self._acceptor.strangers
        if not strangers.total:
            return ""
        return (
            f"{strangers.total} connections that don't know the job's secret came from {strangers}"
        )

    @property
    def many_strangers(self) -> bool:
        """Whether there were more unauthenticated connections than a port scan would make."""
        return self._acceptor.strangers.total > MIN_REPORTED_STRANGERS

    def _admit(self, visitor: socket.socket, nonces: bytes) -> None:
        try:
            channel = channel_of_visitor(visitor, self.secret, nonces)
        except OSError:
            visitor.close()
            return
        host = RemoteHost("", channel, channel.close)
        self.visitors.append(host)
        self._unplaced[host] = time.monotonic() + PLACE_TIMEOUT_S
        if len(self._unplaced) > 2 * self._number + 16:
            oldest = next(iter(self._unplaced))
            del self._unplaced[oldest]
            oldest.close()

    def _place(self, host: RemoteHost, answer: dict[str, object] | None) -> None:
        place = answer.get("place") if answer is not None else None
        if not isinstance(place, int) or place < 0:
            raise ValueError(f"an agent sent the number {place!r}")
        if place in self.found:
            self.twice = place
        if place < self._number:
            self.found[place] = host


def _listen(addresses: list[str]) -> tuple[list[socket.socket], str]:
    """Listen on each address, or on all interfaces if there is none or one can't be used.

    Returns:
        The sockets, and the addresses in the form ``ADDRESS,PORT;ADDRESS,PORT``.
    """
    with ExitStack() as opened, suppress(OSError):
        sockets = [opened.enter_context(listen_on(address)) for address in addresses]
        if sockets:
            opened.pop_all()
            pairs = zip(addresses, sockets, strict=True)
            return sockets, ";".join(f"{at},{door.getsockname()[1]}" for at, door in pairs)
    door = listen_on("")
    addresses = [link.address for link in network_links() if ":" not in link.address]
    port = door.getsockname()[1]
    return [door], ";".join(f"{address},{port}" for address in addresses or ["127.0.0.1"])


def addresses_towards(names: list[str]) -> list[str]:
    """Return this host's addresses to which the nodes can connect.

    These are the addresses of the interfaces in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, if set.
    Otherwise they are the source addresses that the kernel selects towards each node, or 127.0.0.1
    if all nodes are this host. The list is empty if the name of a node does not resolve: the
    scheduler may use another name than the network.
    """
    only = requested_interface()
    named = [link.address for link in of_names(network_links(), only)] if only else []
    if named:
        return named
    pool = ThreadPoolExecutor(32)
    try:
        routes = list(pool.map(_sources, dict.fromkeys(names), timeout=RESOLVE_TIMEOUT_S))
    except (OSError, TimeoutError, UnicodeError):
        return []
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return list(dict.fromkeys(itertools.chain(*routes))) or ["127.0.0.1"]


def _sources(name: str) -> list[str]:
    """Return this host's source addresses towards host ``name``; none for this host itself.

    Raises:
        OSError: The name does not resolve, or none of its addresses can be reached.
    """
    name = name.rpartition("@")[2]
    if is_local_host(name):
        return []
    found = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
    found = [entry for entry in found if entry[0] == socket.AF_INET] or found
    sources = []
    for family, kind, _, _, where in found:
        with socket.socket(family, kind) as probe:  # connect() of a UDP socket sends nothing
            try:
                probe.connect(where)
            except OSError as error:
                failed = error
                continue
            sources.append(str(probe.getsockname()[0]))
    sources = [address for address in sources if not address.startswith("fe80:")]
    if not sources:
        raise failed if found else OSError(f"{name} has no address")
    return sources


class AgentConnections:
    """The tools' processes and the channels to the agents. Must be closed."""

    def __init__(
        self,
        tool: LaunchTool,
        names: list[str],
        quiet: bool = False,
        excluded_hosts: dict[str, str] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            quiet: Print nothing about hosts that do not answer.
            excluded_hosts: Filled with the reason, by name, why hosts do not answer; the others are
                enough. None: all are needed.
        """
        self.tool, self.names, self._quiet = tool, names, quiet
        self._excluded_hosts = excluded_hosts
        self.hosts: list[RemoteHost] = []
        self._visitors: list[RemoteHost] = []
        self._processes: list[_ToolProcess] = []
        self._is_started = self._closing = False

    def start(self) -> list[RemoteHost]:
        """Start an agent on every host, and return the hosts in their order.

        Raises:
            ValueError: A host does not answer; with the tool's output if there is any.
        """
        try:
            if self.tool.one_call_per_host:
                self._start_each()
            else:
                self._start_all()
        except ValueError as mistake:
            if self.hosts or not self.tool.source:
                raise
            # no agent at all: the environment variables of an allocation outlive it
            source = self.tool.source[0].upper() + self.tool.source[1:]
            raise ValueError(f"{mistake}\n{source}") from None
        for host in self.hosts:
            host.hello = host.wait_for_answer("hello", START_TIMEOUT_S)["hello"]
        if not self.tool.one_call_per_host:
            expected = [name for name in self.names if name not in (self._excluded_hosts or {})]
            self.hosts = sort_hosts(self.hosts, expected)
        self._is_started = True
        return self.hosts

    def close(self) -> None:
        """Close the channels, whereupon the agents exit, and end the tools."""
        self._closing = True
        if not self._is_started:
            self._show_output()  # later output is of agents that have lost the launcher
        for host in (*self.hosts, *self._visitors):
            host.close()
        deadline = time.monotonic() + 5.0  # the tools exit when their agents do
        for started in self._processes:
            started.wait_until(deadline)
        for ask in ("terminate", "kill"):
            left = [started for started in self._processes if started.process.poll() is None]
            for started in left:
                getattr(started.process, ask)()
            for started in left:
                started.wait_until(time.monotonic() + 5.0)
        if self._is_started:
            self._show_output()

    def _show_output(self) -> None:
        """Print Paceline's messages from the agents, or all output if a host was lost."""
        if self._quiet and not self.hosts:
            return
        lost = any(host.failure for host in self.hosts)
        for started in self._processes:
            lines = [
                line for line in started.take_new_lines() if lost or line.startswith("paceline:")
            ]
            sys.stderr.write("".join(f"{line}\n" for line in lines))

    def _start_each(self) -> None:
        """Start the agents with one call per host, many in parallel."""
        pool = ThreadPoolExecutor(64)
        calls = {pool.submit(self._start_one, name): name for name in self.names}
        try:
            waiting = set(calls)
            while waiting:
                done, waiting = wait(waiting, NOTICE_INTERVAL_S, FIRST_COMPLETED)
                if not done and not self._quiet:
                    names = name_hosts(sorted(calls[call] for call in waiting))
                    sys.stderr.write(f"paceline: waiting for {names} ...\n")
        except BaseException:  # for example Ctrl-C: do not wait
            self._closing = True
            for started in self._processes:
                started.process.kill()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        answers = [call.result() for call in calls]
        self.hosts = [answer for answer in answers if isinstance(answer, RemoteHost)]
        mistakes = {
            name: str(answer)
            for name, answer in zip(calls.values(), answers, strict=True)
            if isinstance(answer, ValueError)
        }
        if mistakes and (self._excluded_hosts is None or not self.hosts):
            raise ValueError("\n".join(list(dict.fromkeys(mistakes.values()))[:8]))
        if self._excluded_hosts is not None:
            self._excluded_hosts.update(mistakes)

    def _start_one(self, name: str) -> RemoteHost | ValueError:
        """Start one agent, connected by the standard input and output of its call."""
        if self._closing:
            return ValueError("interrupted")
        agent = agent_command(self.tool)
        if is_local_host(name):
            started = _ToolProcess(agent, login_variables(), piped=True)
        else:
            started = _ToolProcess(self.tool.command([name], agent), None, piped=True)
        self._processes.append(started)
        process = started.process
        if self._closing:  # closed meanwhile, by a thread that did not see this process
            process.kill()
        assert process.stdin is not None
        assert process.stdout is not None
        channel = Channel(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()))
        process.stdin.close()
        process.stdout.close()
        if channel.skip_login_output(START_TIMEOUT_S) is None:
            channel.close()
            return ValueError(f"{name}: {explain_failure(name, started.wait_for_output())}")
        return RemoteHost(name, channel, process.kill)

    def _start_all(self) -> None:
        """Start all agents with one call; they connect to the launcher."""
        with AgentListener(self.names) as listener:
            self._visitors = listener.visitors
            variables = {
                k: v for k, v in os.environ.items() if k not in self.tool.removed_variables
            }
            variables["PACELINE_SECRET"] = listener.secret
            agent = [*agent_command(self.tool), "--connect", listener.where]
            started = _ToolProcess(self.tool.command(self.names, agent), variables)
            self._processes.append(started)
            try:
                self._accept(listener, started)
            except ValueError as mistake:
                if self._excluded_hosts is None or not listener.found:
                    raise
                missing = self._missing(listener)
                self._excluded_hosts.update(dict.fromkeys(missing, str(mistake)))
            finally:
                for place, host in listener.found.items():
                    host.name = self.names[place]
                self.hosts = [listener.found[place] for place in sorted(listener.found)]
            if listener.many_strangers and not self._quiet:
                sys.stderr.write(f"paceline: warning: {listener.strangers()}\n")

    def _missing(self, listener: AgentListener) -> list[str]:
        return [name for place, name in enumerate(self.names) if place not in listener.found]

    def _accept(self, listener: AgentListener, started: "_ToolProcess") -> None:
        """Wait for the agents of all hosts.

        Raises:
            ValueError: Some can no longer come, or did not within START_TIMEOUT_S.
        """
        begun = last_notice = time.monotonic()
        while len(listener.found) < len(self.names):
            listener.wait(0.2)
            self._check(listener, started)
            now = time.monotonic()
            missing = name_hosts(self._missing(listener))
            if now - begun > START_TIMEOUT_S:
                hint = "check that these nodes can reach this one, or use --launcher ssh"
                if strangers := listener.strangers():
                    hint = f"{strangers}; end these programs, or use --launcher ssh"
                raise ValueError(
                    f"no agent of {missing} connected to {listener.where} within "
                    f"{START_TIMEOUT_S:.0f} s. Output of {self.tool.name}: "
                    f"{started.wait_for_output() or 'none'}. HINT: {hint}"
                )
            if now - last_notice > NOTICE_INTERVAL_S and not self._quiet:
                last_notice = now
                sys.stderr.write(f"paceline: waiting for {missing} ...\n")
                sys.stderr.write("".join(f"  {line}\n" for line in started.take_new_lines()))

    def _check(self, listener: AgentListener, started: "_ToolProcess") -> None:
        """Raise ValueError if agents can no longer come."""
        if self._closing:  # by another thread, which has not seen the latest visitors
            for visitor in listener.visitors:
                visitor.close()
            raise ValueError("interrupted")
        if listener.twice is not None:
            raise ValueError(
                f"two agents have the number {listener.twice}: {self.tool.name} numbers its "
                "processes by no environment variable that Paceline knows. HINT: --launcher ssh"
            )
        if len(listener.found) == len(self.names):
            return
        strangers = listener.strangers()
        if started.process.poll() is not None:
            lines = started.wait_for_output() or "without any output"
            note = f" ({strangers})" if strangers else ""
            raise ValueError(f"{self.tool.name} has ended: {lines}{note}")
        ended = started.ended_numbers(self.tool) - listener.found.keys()
        if ended and (
            self._excluded_hosts is None or len(ended) == len(self.names) - len(listener.found)
        ):
            names = name_hosts([self.names[place] for place in sorted(ended)])
            last_lines = [*started.output_lines()[-8:], *([strangers] if strangers else [])]
            raise ValueError(
                f"the agent of {names} ended before it connected: " + "\n".join(last_lines)
            )


class _ToolProcess:
    """A process of the tool, in its own session: the launcher handles Ctrl-C."""

    def __init__(
        self, command: list[str], variables: dict[str, str] | None, piped: bool = False
    ) -> None:
        self.lines: deque[str] = deque(maxlen=50)
        self.new_lines: deque[str] = deque(maxlen=50)
        self.process = subprocess.Popen(
            program_command(*command),
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if piped else subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
        self._stream = self.process.stderr if piped else self.process.stdout
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._stream is not None
        for line in self._stream:
            text = line.decode(errors="replace").rstrip()
            self.lines.append(text)
            self.new_lines.append(text)

    def wait_for_output(self) -> str:
        """Return the last lines of its output, all of them if it has ended."""
        self.wait_until(time.monotonic() + 2.0)
        return "\n".join(self.output_lines())

    def output_lines(self) -> list[str]:
        """Return the last lines of its output so far."""
        return [line for line in list(self.lines) if line]

    def ended_numbers(self, tool: LaunchTool) -> set[int]:
        """Return the numbers of its processes that have ended, as far as its output says."""
        if not tool.exit_pattern:
            return set()
        matches = [re.match(tool.exit_pattern, line) for line in self.output_lines()]
        return {int(n) for match in matches if match for n in expand_numbers(match["tasks"])}

    def take_new_lines(self) -> list[str]:
        """Return its output lines since the last call."""
        return [self.new_lines.popleft() for _ in range(len(self.new_lines))]

    def wait_until(self, deadline: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
            self._reader.join(1.0)


def sort_hosts(hosts: list[RemoteHost], names: list[str]) -> list[RemoteHost]:
    """Return the agents in the order of ``names``, if hosts use these names themselves, because
    tools may order hosts differently. Otherwise keep the tool's order, with the hosts' own names
    unless all are equal.
    """
    own_names = [_short(host.hello["name"]) for host in hosts]
    wanted = [_short(name) for name in names]
    if len(set(own_names)) < len(own_names):
        return hosts
    if set(own_names) == set(wanted):
        by_name = dict(zip(own_names, hosts, strict=True))
        hosts = [by_name[name] for name in wanted]
        for host, name in zip(hosts, names, strict=True):
            host.name = name
        return hosts
    for host in hosts:
        host.name = host.hello["name"]
    return hosts


def name_hosts(names: list[str]) -> str:
    """Return names of hosts for a message, abbreviated for many hosts."""
    more = f" and {len(names) - MAX_NAMED_HOSTS} more" if len(names) > MAX_NAMED_HOSTS else ""
    return ", ".join(names[:MAX_NAMED_HOSTS]) + more


def _short(name: str) -> str:
    return name.rpartition("@")[2].partition(".")[0]


def agent_command(tool: LaunchTool) -> list[str]:
    """Return the command of the agent. If the tool does not forward the environment, it sets the
    variables that Python needs at its start.
    """
    command = python_command("-m", "paceline.launch.host_agent")
    passed = {} if tool.passes_environment else interpreter_variables()
    variables = [f"{name}={value}" for name, value in passed.items()]
    return ["env", *variables, *command] if variables else command


def explain_failure(host: str, output: str) -> str:
    """Return the output of a failed call, with a hint for known failures."""
    for template, explanation in KNOWN_FAILURES:
        pattern = template.replace("{python}", re.escape(sys.executable))
        if re.search(pattern, output):
            line = next((x for x in output.splitlines() if re.search(pattern, x)), output)
            return explanation.format(
                host=host, python=shlex.quote(sys.executable), said=line.strip()
            )
    return output or "its agent ended without any output. HINT: run paceline on that node, over ssh"
