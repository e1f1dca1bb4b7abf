"""Protobuf messages made from their descriptors: plausible by what is known, else what types allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.fuzz.chance import Chance

Known = Mapping[str, Callable[[Chance], Any]]
"""By a field's name, or "Message.field": what it plausibly holds. By "Message": what makes one whole."""

_BITS = {
    FieldDescriptor.CPPTYPE_INT32: 31,
    FieldDescriptor.CPPTYPE_INT64: 63,
    FieldDescriptor.CPPTYPE_UINT32: 32,
    FieldDescriptor.CPPTYPE_UINT64: 64,
}
_TEXT, _MESSAGE, _ENUM = (
    FieldDescriptor.CPPTYPE_STRING,
    FieldDescriptor.CPPTYPE_MESSAGE,
    FieldDescriptor.CPPTYPE_ENUM,
)
_MANY = (0, 1, 1, 1, 2, 3)
_TOO_MANY = (0, 2, 17, 64, 65, 200)
_ABSENT = 0.005
"""And as many as are wild."""


class _Plan:
    """What is to be known of a type, looked up once."""

    __slots__ = ("fields", "kind", "name", "oneofs")

    def __init__(self, descriptor: Descriptor) -> None:
        self.name = descriptor.name
        self.kind = GetMessageClass(descriptor)
        self.oneofs = [list(oneof.fields) for oneof in descriptor.oneofs]
        self.fields = [field for field in descriptor.fields if field.containing_oneof is None]


@cache
def _plan(descriptor: Descriptor) -> _Plan:
    return _Plan(descriptor)


def _numbers(field: FieldDescriptor) -> tuple[int, ...]:
    return () if field.enum_type is None else tuple(field.enum_type.values_by_number)


def _scalar(field: FieldDescriptor, chance: Chance) -> Any:
    kind = field.cpp_type
    if kind == _TEXT:
        return chance.raw() if field.type == FieldDescriptor.TYPE_BYTES else chance.text()
    if kind == _ENUM:
        return chance.pick((*_numbers(field), 99, -1))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.odds(0.5)
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.pick((0.0, -1.0, 1e308, float("inf"), float("nan"), chance.random()))
    bits = _BITS[kind]
    return chance.number(bits, signed=bits in (31, 63))


def make(descriptor: Any, chance: Chance, known: Known) -> Message:
    """Return a message; the wilder the chance, the less of it is plausible."""
    plan = _plan(descriptor)
    message: Message = plan.kind()
    fill(message, chance, known)
    return message


def fill(message: Message, chance: Chance, known: Known) -> None:
    """Fill an empty message."""
    plan = _plan(message.DESCRIPTOR)
    wild = chance.wild
    absent = _ABSENT + wild
    for field in plan.fields:
        if chance.random() >= absent:
            _set(message, plan, field, chance, known)
    for oneof in plan.oneofs:
        if chance.random() >= wild / 2:
            _set(message, plan, chance.pick(oneof), chance, known)
    whole = known.get(plan.name)
    if whole is not None and chance.random() >= wild:
        whole(chance)(message)


def _set(message: Any, plan: _Plan, field: FieldDescriptor, chance: Chance, known: Known) -> None:
    name, odd = field.name, chance.random() < chance.wild
    if field.is_repeated:
        values = getattr(message, name)
        for _ in range(chance.pick(_TOO_MANY if odd else _MANY)):
            if field.cpp_type == _MESSAGE:
                fill(values.add(), chance, known)
            else:
                values.append(_value(plan, field, chance, known, odd))
        return
    if field.cpp_type == _MESSAGE:
        inner = getattr(message, name)
        inner.SetInParent()
        fill(inner, chance, known)
        return
    setattr(message, name, _value(plan, field, chance, known, odd))


def _value(plan: _Plan, field: FieldDescriptor, chance: Chance, known: Known, odd: bool) -> Any:
    if not odd:
        plausible = known.get(f"{plan.name}.{field.name}") or known.get(field.name)
        if plausible is not None:
            return plausible(chance)
        if field.cpp_type == _ENUM:
            return chance.pick(_numbers(field))
        if field.cpp_type in _BITS:
            return chance.below(100)
    return _scalar(field, chance)


def encoded(message: Message, chance: Chance) -> bytes:
    """Return a message on the wire: mostly as it is, else with unknown fields, spoiled, or none at all."""
    raw = message.SerializeToString()
    kind = chance.random()
    if kind < 0.75:
        return raw
    if kind < 0.80:
        return raw + chance.pick(
            (b"\xf8\x07\x01", b"\xfa\x3f\x03abc", b"\xc1\x3e12345678", b"\x9b\x06\x9c\x06")
        )
    if kind < 0.97:
        return chance.spoiled(raw)
    return chance.raw()
