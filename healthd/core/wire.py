"""
JSON of the model: strict on the way in (types, depth, no surplus of bytes), exact on the way out.

The library is imported by the first call: a passive round of `healthd check` needs it late or not at all.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from checks.json_text import TooDeepError, require_shallow
from checks.printable import printable_bytes
from healthd.core.errors import BadInputError

if TYPE_CHECKING:
    import msgspec

T = TypeVar("T")

FROM_OUTSIDE: Mapping[str, str | bool] = {
    "extra": "forbid",
    "strict": True,
    "allow_inf_nan": False,
    "use_attribute_docstrings": True,
}
"""
The `__pydantic_config__` of records that the API takes: an unknown member is an error, since a typo must not be lost;
"1" is no number; what stands under a member describes it. A plain mapping, since this room knows nothing of pydantic.
"""
_making = threading.Lock()
_decoders: dict[object, msgspec.json.Decoder[Any]] = {}  # a few dozen: the types that this program asks for


def encode(value: Any) -> bytes:
    """
    JSON of any record of the model; control characters that JSON lets stand (DEL, C1, bidi) are escaped too.

    BadInputError for text that was no UTF-8 where it came from: an argument, a variable, a name of a file.
    """
    import msgspec

    try:
        return printable_bytes(msgspec.json.encode(value))
    except UnicodeEncodeError as error:
        raise BadInputError(f"{error.object[:80]!r} is not UTF-8; write it in UTF-8") from None


def sparse(record: object) -> object:
    """
    A record without the members that have their defaults, so that a reader one version older, which refuses members
    that it does not know, reads what it could be told too. Anything else is handed on as it is.
    """
    if not dataclasses.is_dataclass(record) or isinstance(record, type):
        return record
    said = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if value != made:
            said[field.name] = sparse(value)
    return said


def indented(body: bytes) -> bytes:
    """The same JSON for eyes: a member a line, and a newline at its end."""
    import msgspec

    return msgspec.json.format(body, indent=2) + b"\n"


def decode(body: bytes, wanted: type[T], *, what: str) -> T:
    """A record out of JSON; BadInputError names the member and what was wrong. Unknown members are ignored."""
    import msgspec

    try:
        require_shallow(body)
        found: T = _decoder(wanted).decode(body)
        return found
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, TooDeepError) as error:
        raise BadInputError(f"{what}: {error}") from None


def plain(value: Any) -> Any:
    """The same as dicts, lists and strings."""
    import msgspec

    return msgspec.to_builtins(value)


def convert(value: Any, wanted: type[T], *, what: str) -> T:
    """A record out of dicts, lists and strings; raises like `decode`."""
    import msgspec

    _decoder(wanted)
    try:
        return msgspec.convert(value, type=wanted)
    except msgspec.ValidationError as error:
        raise BadInputError(f"{what}: {error}") from None


def _decoder(wanted: type[T]) -> msgspec.json.Decoder[T]:
    """
    Made by one thread at a time, with all that msgspec keeps of the type.

    msgspec 0.22 crashes the process where a thread uses what another one has made half of.
    """
    import msgspec

    with _making:
        if wanted not in _decoders:
            _decoders[wanted] = msgspec.json.Decoder(wanted)
        return _decoders[wanted]
