"""Checks that vLLM has what the connector uses of it, so that another version fails at start, saying why.

vLLM promises little of what a connector lives on: attributes with a leading underscore, names of parameters,
fields of what is passed around. All of it is declared in `compat`; here a declaration is compared with what
is there. Knows nothing of vLLM by itself.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


class VersionError(ImportError):
    """This vLLM lacks something kvplane needs; the message names the version, the thing, and what for."""


@dataclass(frozen=True, slots=True)
class Need:
    """Something the connector uses of one class of vLLM.

    Attributes:
        owner: the class, or "module:name" of it.
        purpose: what kvplane needs it for, completing "which kvplane needs to ...".
        methods: name to names of parameters it is called with, in order, without self.
        attributes: names of attributes, fields or properties; "a|b" where either will do.
    """

    owner: type | str
    purpose: str
    methods: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    attributes: tuple[str, ...] = ()


def check(needs: Iterable[Need], *, version: str, known: Iterable[str]) -> None:
    """Compare all needs with what is there.

    Args:
        needs: what is used.
        version: of vLLM, for the message.
        known: versions kvplane was run with, for the message.

    Raises:
        VersionError: something is missing. All that is missing is named, one line each.
    """
    missing = [
        f"vLLM {version} lacks {name}, which kvplane needs to {need.purpose}"
        for need in needs
        for name in _missing(need)
    ]
    if missing:
        versions = ", ".join(known)
        raise VersionError("\n".join([*missing, f"Run with these versions of vLLM: {versions}"]))


def _missing(need: Need) -> Iterator[str]:
    owner = _owner(need.owner)
    if owner is None:
        yield str(need.owner).replace(":", ".")
        return
    for method, wanted in need.methods.items():
        function = getattr(owner, method, None)
        if not callable(function):
            yield f"{owner.__name__}.{method}"
            continue
        lacking = _lacking(function, wanted)
        if lacking:
            yield f"{owner.__name__}.{method}({', '.join(wanted)}) (no {lacking} at its place)"
    known = attributes_of(owner)
    for attribute in need.attributes:
        if not known.intersection(attribute.split("|")):
            yield f"{owner.__name__}.{attribute.replace('|', ' or ')}"


def _owner(owner: type | str) -> type | None:
    if isinstance(owner, type):
        return owner
    module, _, name = owner.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) else None


def _lacking(function: Any, wanted: tuple[str, ...]) -> str:
    """Return the first parameter that cannot be given by position and name, "" if all can."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return ""
    names = [parameter.name for parameter in parameters if parameter.name != "self"]
    for place, name in enumerate(wanted):
        if place >= len(names) or names[place] != name:
            return name
    return ""


def attributes_of(owner: type) -> set[str]:
    """Return the names an object of the class has: of the class, its fields, and what __init__ sets."""
    names = set(dir(owner))
    for kind in owner.__mro__:
        names.update(inspect.get_annotations(kind))
        for method in ("__init__", "__post_init__"):
            function = kind.__dict__.get(method)
            code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
            if code is not None:
                names.update(code.co_names)
    return names
