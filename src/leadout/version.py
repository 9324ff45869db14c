"""The one place that names Leadout's version."""

__version__ = "0.1.0.dev0"
