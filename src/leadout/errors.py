"""The base of every error meant for a user, the exit codes, and values made safe to print."""

from __future__ import annotations

# The exit codes of every command; docs/reference/commands.md documents them.
SUCCESS = 0  # or: the pair fits, the drafter pays
NEGATIVE = 1  # a negative finding: unfit, rejected, slower
FAILED = 2  # wrong usage, or the command could not run
UNDECIDED = 3  # ran, but the evidence does not suffice for a verdict
INTERRUPTED = 130  # by Ctrl-C, for which it is the shell's code, or by SIGTERM


class LeadoutError(Exception):
    """Something a user can act on: the message names the value, what was expected and the remedy.

    `cli/app.py` prints the message and ends with `exit_code`. Any other exception is a bug and
    may show its traceback.
    """

    exit_code = FAILED


class StoppedError(LeadoutError):
    """Ctrl-C or SIGTERM ended long work: the message says where it stopped and how to continue."""

    exit_code = INTERRUPTED


_MAX_SHOWN = 160  # characters


def printable(text: str) -> str:
    """Text from a file, with control characters escaped so that a terminal can show it."""
    return text if text.isprintable() else ascii(str(text))


def shown(value: object) -> str:
    """A value from a file for a message: escaped, and shortened if it is enormous."""
    return shortened(repr(value))


def shortened(text: str, limit: int = _MAX_SHOWN) -> str:
    """Text from a file that may be enormous, escaped and shortened for a message."""
    text = printable(text)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
