"""Packages that can be called: `leadout.check(...)` although `leadout.check` is a package.

Importing `leadout.check.run` sets the attribute `check` of `leadout` to the package, whatever was
there before, so the package itself has to be callable.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        command = self.__name__.rpartition(".")[2]
        return getattr(import_module("leadout.api"), command)(*arguments, **settings)


def make_callable(package: str) -> None:
    """Calls of the package go to the function of its name in `leadout.api`."""
    sys.modules[package].__class__ = _CallablePackage
