"""Structured logs with structlog where it is installed, else the same through the standard library."""

from __future__ import annotations

import logging
import traceback
from hashlib import blake2b
from pathlib import PurePath
from typing import Any, Protocol


class Logger(Protocol):
    """What kvplane needs of a logger: an event in snake_case and fields."""

    def debug(self, event: str, **fields: Any) -> Any:
        """Log what a developer may want to know; ask `debugging` before."""

    def info(self, event: str, **fields: Any) -> Any:
        """Log what an operator may want to know."""

    def warning(self, event: str, **fields: Any) -> Any:
        """Log what an operator should look at."""

    def error(self, event: str, **fields: Any) -> Any:
        """Log what an operator must look at."""


class _StandardLogger:
    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: Any) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._log(logging.ERROR, event, fields)

    def _log(self, level: int, event: str, fields: dict[str, Any]) -> None:
        text = " ".join([event, *(f"{name}={value}" for name, value in fields.items())])
        self._logger.log(level, "%s", text)


def hashed(tenant_id: str, conversation: str) -> str:
    """Return what stands for a conversation in logs."""
    digest = blake2b(digest_size=8)
    digest.update(len(tenant_id).to_bytes(4, "little"))
    digest.update(tenant_id.encode())
    digest.update(conversation.encode())
    return digest.hexdigest()


def debugging(name: str) -> bool:
    """Whether lines at debug level are wanted of logger `name`, or of vLLM (VLLM_LOGGING_LEVEL=DEBUG).

    To be asked first: in an engine nobody configures structlog, and it then prints every level.
    """
    return any(logging.getLogger(known).isEnabledFor(logging.DEBUG) for known in (name, "vllm"))


def trace(error: BaseException) -> str:
    """Return where an exception came from, innermost last, as file:line only.

    No message and no variables: those of a request hold its tokens, and loggers like to show them.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return " > ".join(f"{PurePath(frame.filename).name}:{frame.lineno}" for frame in frames[-8:])


def get_logger(name: str) -> Logger:
    """Return a logger called `name`."""
    try:
        import structlog
    except ImportError:
        return _StandardLogger(name)
    logger: Logger = structlog.get_logger(name)
    return logger
