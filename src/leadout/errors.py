"""The base of every error that is meant for a user, and the exit codes of the command line."""

from __future__ import annotations

# The exit codes of every command; docs/reference/commands.md documents them.
SUCCESS = 0  # or: the pair fits, the drafter pays
NEGATIVE = 1  # a negative finding: unfit, rejected, slower
FAILED = 2  # wrong usage, or the command could not run
UNDECIDED = 3  # ran, but the evidence does not suffice for a verdict


class LeadoutError(Exception):
    """Something a user can act on: the message names the value, what was expected and the remedy.

    `cli/app.py` prints the message and ends with `exit_code`. Any other exception is a bug and
    may show its traceback.
    """

    exit_code = FAILED
