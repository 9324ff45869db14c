"""`leadout tune`: how many tokens to draft at each batch size, for one pair on one machine."""

from leadout.callable_package import make_callable

make_callable(__name__)
