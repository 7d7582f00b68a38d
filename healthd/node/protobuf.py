"""Protocol buffers without generated code: the few messages of the node's gRPC calls need three rules of the format."""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
MAX_VARINT_BYTES = 10


class ProtobufError(ValueError):
    """Bytes that are no message."""


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field number and value of each field in order; a number for what is no bytes. ProtobufError when it is cut."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise ProtobufError("field number 0")
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ProtobufError(f"wire type {kind}")
        if at + size > len(message):
            raise ProtobufError("the field is incomplete")
        part, at = message[at : at + size], at + size
        yield number, part if kind == _BYTES else int.from_bytes(part, "little")


def messages(message: bytes, number: int) -> Iterator[bytes]:
    """The embedded messages (or strings) of one field number."""
    for found, value in fields(message):
        if found == number:
            if not isinstance(value, bytes):
                raise ProtobufError(f"field {number} is a number")
            yield value


def text(message: bytes, number: int) -> str:
    """The string of one field number, the last as the format wants it; empty when it is not there."""
    last = b""
    for value in messages(message, number):
        last = value
    try:
        return last.decode()
    except UnicodeDecodeError:
        raise ProtobufError(f"field {number} is not text") from None


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(MAX_VARINT_BYTES):
        if at + index >= len(message):
            raise ProtobufError("the number is incomplete")
        byte = message[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise ProtobufError("the number does not end")


def field(number: int, value: int | bytes | str) -> bytes:
    """One field: a number that is not negative, or a truth value; else bytes, a string, or an embedded message."""
    if isinstance(value, int):
        return _number(number << 3 | _VARINT) + _number(value)
    content = value.encode() if isinstance(value, str) else value
    return _number(number << 3 | _BYTES) + _number(len(content)) + content


def _number(value: int) -> bytes:
    """A varint."""
    if value < 0:
        raise ValueError(f"{value}: negative numbers do not occur in these messages")
    groups = [value & 0x7F]
    while value := value >> 7:
        groups.append(value & 0x7F)
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])
