"""A verdict, and the words that the verdicts of a run and of a diagnosis share."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

UNCERTAIN = "Uncertain"
MAX_NAMED_HOSTS = 8  # of a command; longer lists are left to the allocation
MAX_COMMAND_CHARS = 400


@dataclass(frozen=True)
class Verdict:
    """What limits a training, in three sentences.

    Attributes:
        verdict: What limits the training, and how much.
        why: The evidence.
        next: The one thing to do: a command, or a line of the script with what to change there.
    """

    verdict: str
    why: str
    next: str

    def lines(self) -> list[tuple[str, str]]:
        """Return the three lines of every report as (label, sentence)."""
        return [("Verdict", self.verdict), ("Why", self.why), ("Next", self.next)]


def begin_sentence(text: str) -> str:
    """Return the text with a capital letter at the start and a full stop at the end."""
    return end_sentence(capitalized(text))


def capitalized(text: str) -> str:
    """Return the text with a capital letter at the start; the others remain as they are."""
    return text[:1].upper() + text[1:]


def end_sentence(text: str) -> str:
    """Return the text with a full stop at the end."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def in_doubt(sentence: str, doubt: str) -> str:
    """Return a sentence with the reason why it is uncertain; unchanged without a reason."""
    return f"{UNCERTAIN} ({doubt}): {sentence}" if doubt else sentence


def diagnose_command(
    options: Sequence[str], words: Sequence[str], wanted: Sequence[str] = ()
) -> str:
    """Return the command that diagnoses a job, as a user types it.

    options: Options of ``paceline diagnose`` that choose the ranks. words: The script with its
    arguments; empty if they are unknown. wanted: Further options, such as ``--try NAME``.
    """
    command = shlex.join(["paceline", "diagnose", *options, *wanted, *(words or ["SCRIPT"])])
    if len(command) <= MAX_COMMAND_CHARS:
        return command
    return f"{command[:MAX_COMMAND_CHARS]} ..."


def with_comment(command: str, comment: str) -> str:
    """Return a command with what it is for: one line that a shell runs as it is."""
    return f"{command}  # {comment}" if comment else command


def rank_options(hosts: Sequence[str], size: int) -> list[str]:
    """Return the options that start as many ranks again. hosts: The node of each recorded rank."""
    each = {host: hosts.count(host) for host in dict.fromkeys(hosts)}
    if len(each) < 2:
        return ["-n", str(size)]
    if len(each) > MAX_NAMED_HOSTS:
        return []  # in an allocation, paceline diagnose takes its nodes
    return ["-H", ",".join(f"{host}:{count}" for host, count in each.items())]
