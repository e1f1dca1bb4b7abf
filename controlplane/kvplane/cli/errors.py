"""What commands end with where they cannot do what they were asked to. Importing it costs nothing."""

from __future__ import annotations

IN_SECONDS = "; it is in seconds, without a unit, such as 300"
"""What to do about a time that is wrong."""


class ConfigError(ValueError):
    """Configuration that cannot work: one line that names the option and the remedy."""

    def __init__(self, text: str) -> None:
        super().__init__(text if text.isprintable() else "".join(map(_printable, text)))


def _printable(character: str) -> str:
    """Return a character as a line can show it: values from files and the environment may hold any."""
    return character if character.isprintable() else character.encode("unicode_escape").decode()


class StartError(Exception):
    """The program cannot start: one line that says why and what to do."""


class NotNowError(StartError):
    """The program cannot start, or go on, though what it was told is right: another start may go better.

    It ends with 1, so that whoever looks after it knows that it is to be started again.
    """
