"""Training a drafter on the target's own answers, and verifying its acceptance in vLLM."""

from leadout.callable_package import make_callable

make_callable(__name__)
