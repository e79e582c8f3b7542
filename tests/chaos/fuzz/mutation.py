"""Seeded mutations: what clients send, almost right or far from it."""

import random
import struct
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTEGERS = (0, 1, -1, 2, 7, 127, 128, 255, 256, 4095, 65_536, 10**6, 2**31 - 1, -(2**31), 2**32, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 1e-45, 1e-7, 1e38, -1e38, float("inf"), float("-inf"), float("nan"))
WORDS = (
    "",
    " ",
    "a",
    "Hello",
    "\0",
    "\n",
    "\r\n",
    "\x1b[2J",
    "\u2028",
    "\ufeff",
    "\u202e",
    "é",
    "漢字",
    "e\u0301",
    "👩‍👩‍👧",
    "\U0010ffff",
    "\ufffd",
    "ﬀ",
    "ẞ",
    "İ",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</think>",
    "{{",
    "{%",
    "{{ 7 * 7 }}",
    "%s%n",
    "${7*7}",
    "../../etc/passwd",
    "'; --",
    '"',
    "\\",
    "\\u0000",
    "null",
    "NaN",
    "-1",
    "1e999",
    "0x10",
    "user",
    "assistant",
    "system",
    "tool",
    "json_object",
    "auto",
    "required",
    "none",
)
_INTEGER_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_MAX_REPEATS = 64
_MAX_DEPTH = 6


class Mutator:
    """One case: the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def is_so(self, probability: float) -> bool:
        return self.random.random() < probability

    def integer(self) -> int:
        return self.random.choice((*INTEGERS, self.random.randrange(-100, 100), self.random.getrandbits(64)))

    def text(self) -> str:
        words = self.random.choices(WORDS, k=self.random.randrange(1, 4))
        return "".join(words) * self.random.choice((1, 1, 1, 1, 3, 200))

    # -- bytes -------------------------------------------------------------------------------------------------------

    def bytes(self, data: bytes) -> bytes:
        """A few edits: flips, cuts, repeats, insertions, the same bytes elsewhere."""
        changed = bytearray(data)
        for _ in range(self.random.choice((1, 1, 2, 4, 8))):
            self.random.choice((self._flip, self._cut, self._repeat, self._insert, self._overwrite))(changed)
        return bytes(changed)

    def _place(self, data: bytearray) -> tuple[int, int]:
        start = self.random.randrange(len(data) + 1)
        return start, min(len(data), start + self.random.choice((1, 1, 2, 4, 16, 256)))

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)

    def _cut(self, data: bytearray) -> None:
        start, end = self._place(data)
        del data[start : end if self.is_so(0.7) else len(data)]

    def _repeat(self, data: bytearray) -> None:
        start, end = self._place(data)
        data[start:start] = data[start:end] * self.random.choice((1, 2, 50))

    def _insert(self, data: bytearray) -> None:
        start, _ = self._place(data)
        data[start:start] = self.random.choice(
            (
                b"\xff" * 10,  # a varint that does not end
                b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01",
                struct.pack("<d", self.random.choice(FLOATS)),
                self.random.randbytes(self.random.randrange(1, 16)),
                self.random.choice(WORDS).encode(),
            )
        )

    def _overwrite(self, data: bytearray) -> None:
        start, end = self._place(data)
        source, _ = self._place(data)
        data[start:end] = data[source : source + end - start]

    # -- JSON --------------------------------------------------------------------------------------------------------

    def json(self, value: Any) -> Any:
        """A copy in which one value, or several, are others, gone, or nested in something."""
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            value = self._json_edit(value)
        return value

    def json_value(self, depth: int = 0) -> Any:
        kinds: list[Callable[[], Any]] = [
            lambda: None,
            lambda: self.is_so(0.5),
            self.integer,
            lambda: self.random.choice(FLOATS),
            self.text,
            self.text,
            lambda: [],
            lambda: {},
        ]
        if depth < _MAX_DEPTH:
            kinds.append(lambda: [self.json_value(depth + 1) for _ in range(self.random.randrange(1, 4))])
            kinds.append(lambda: {self.random.choice(WORDS): self.json_value(depth + 1) for _ in range(2)})
            kinds.append(lambda: _nested(self.random.choice((40, 400)), self.is_so(0.5)))
        return self.random.choice(kinds)()

    def _json_edit(self, value: Any) -> Any:
        is_container = isinstance(value, dict | list) and len(value) > 0
        if not is_container or self.is_so(0.15):
            return [value] if self.is_so(0.1) else self.json_value()
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        key = self.random.choice([*copy]) if isinstance(copy, dict) else self.random.randrange(len(copy))
        action = self.random.random()
        if action < 0.1:
            del copy[key]
        elif action < 0.2 and isinstance(copy, dict):
            copy[self.random.choice(WORDS)] = self.json_value()
        elif action < 0.2:
            copy += [copy[key]] * self.random.choice((1, 3, 100))
        else:
            copy[key] = self._json_edit(copy[key])
        return copy

    # -- protobuf ----------------------------------------------------------------------------------------------------

    def message(self, message: Message) -> Message:
        """A copy with some fields set to others of their type, cleared or repeated."""
        copy = type(message)()
        copy.CopyFrom(message)
        for _ in range(self.random.choice((1, 1, 2, 3, 6))):
            self._change(copy, 0)
        return copy

    def _change(self, message: Message, depth: int) -> None:
        # What is there already is what the service reads; other fields are tried as well.
        present: list[FieldDescriptor] = [field for field, _ in message.ListFields()]
        every: Any = message.DESCRIPTOR.fields
        fields: list[FieldDescriptor] = present if present and self.is_so(0.6) else list(every)
        if not fields or depth > _MAX_DEPTH:
            return
        field = self.random.choice(fields)
        if self.is_so(0.1):
            message.ClearField(field.name)
        elif _is_map(field):
            self._change_map(message, field, depth)
        elif field.is_repeated:
            self._change_repeated(message, field, depth)
        elif field.message_type is not None:
            part = getattr(message, field.name)
            part.SetInParent()
            self._change(part, depth + 1)
        else:
            setattr(message, field.name, self.scalar(field))

    def _change_map(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        assert field.message_type is not None
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        entries = getattr(message, field.name)
        if value.message_type is not None:
            self._change(entries[self.scalar(key)], depth + 1)
        else:
            entries[self.scalar(key)] = self.scalar(value)

    def _change_repeated(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        values = getattr(message, field.name)
        action = self.random.random()
        if len(values) and action < 0.2:
            del values[self.random.randrange(len(values)) :]
        elif field.message_type is not None:
            part = self.random.choice(values) if len(values) and action < 0.7 else values.add()
            self._change(part, depth + 1)
        elif len(values) and action < 0.5:
            values[self.random.randrange(len(values))] = self.scalar(field)
        else:
            values.extend(self.scalar(field) for _ in range(self.random.choice((1, 2, _MAX_REPEATS))))

    def scalar(self, field: FieldDescriptor) -> Any:
        """A value of the type of a field that holds no message."""
        kind = field.cpp_type
        if kind in _INTEGER_RANGES:
            low, high = _INTEGER_RANGES[kind]
            return min(max(self.integer(), low), high)
        if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
            return self.random.choice(FLOATS)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return self.is_so(0.5)
        if field.enum_type is not None:
            return self.random.choice((*(value.number for value in field.enum_type.values), 99, -1))
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self.random.randbytes(self.random.choice((0, 1, 4, 300)))
        return self.text()


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _nested(depth: int, in_lists: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if in_lists else {"a": value}
    return value
