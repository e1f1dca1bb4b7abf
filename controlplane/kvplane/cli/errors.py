"""What commands end with where they cannot do what they were asked to. Importing it costs nothing."""

from __future__ import annotations


class ConfigError(ValueError):
    """Configuration that cannot work: one line that names the option and the remedy."""


class StartError(Exception):
    """The program cannot start: one line that says why and what to do."""
