"""Whether a drafter fits a target: from files, in the engine, and the cause if it does not."""

from leadout.callable_package import make_callable

make_callable(__name__)
