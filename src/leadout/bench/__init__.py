"""`leadout bench`: how much faster a drafter serves than bare vLLM, measured with real load."""

from leadout.callable_package import make_callable

make_callable(__name__)
