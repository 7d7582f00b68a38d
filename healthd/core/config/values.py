"""One value of the settings, from text or from the file, as the type that its key has."""

from __future__ import annotations

import enum
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from healthd.core.config.schema import MAPPINGS, Seconds, is_union
from healthd.core.errors import ConfigError

LONGEST_SECONDS = 1e10
"""Three hundred years; longer is a slip, and without an end nothing would ever time out."""
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*")
_UNIT_SECONDS = {"ms": 1e-3, "s": 1.0, None: 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str | float) -> float:
    """Seconds of `2s`, `10m`, `1h`, `1d`, `250ms` or a plain number; ValueError says what would be right."""
    found: float = -1
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        found = text
    elif isinstance(text, str) and (match := _DURATION.fullmatch(text)):
        found = float(match[1]) * _UNIT_SECONDS[match[2]]
    if 0 <= found <= LONGEST_SECONDS:  # also catches NaN
        return float(found)
    raise ValueError(f"{text!r} is not a duration; write 2s, 10m or 1h")


def leaf(annotation: Any, path: Sequence[str], value: Any, *, where: str, text: bool) -> Any:
    """One value, converted; `text` says that it came as text and may need splitting."""
    name = ".".join(path)
    options = typing.get_args(annotation) if is_union(annotation) else (annotation,)
    wanted = next(option for option in options if option is not type(None))
    empty = text and wanted is Path and value == ""  # HEALTHD_CA_FILE= of a manifest whose value was left empty
    if (value is None or empty) and type(None) in options:
        return None
    origin = typing.get_origin(wanted)
    try:
        if isinstance(wanted, type) and issubclass(wanted, Seconds):
            return parse_duration(value)
        if origin in (tuple, list):
            if text:
                value = [part.strip() for part in value.split(",") if part.strip()]
            elif isinstance(value, str):
                raise ValueError(f"must be a list, not {value!r}")
        if origin in MAPPINGS and text:
            value = _pairs(value)
        if origin in MAPPINGS and isinstance(value, dict) and typing.get_args(wanted)[1] is Seconds:
            value = {key: parse_duration(item) for key, item in value.items()}
            wanted = dict[typing.get_args(wanted)[0], float]  # type: ignore[misc]
        if wanted is Path:
            return _path(wanted, value)
        if wanted is bool and text:
            return _boolean(value)
        return _converted(value, wanted, strict=not text)
    except ValueError as error:
        choices = _choices(typing.get_args(wanted)[0] if origin in (tuple, list) else wanted)
        wrong = next((one for one in value if one not in choices), value) if isinstance(value, (list, tuple)) else value
        said = f"{wrong!r} is none of: {', '.join(choices)}" if choices else error
        raise ConfigError(f"{where}: {name}: {said}") from None


def _pairs(text: str) -> dict[str, str]:
    """Of `name=value,name=value`."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not separator for _, separator, _ in pairs):
        raise ValueError(f"{text!r} must be written name=value,name=value")
    found = {key.strip(): item.strip() for key, _, item in pairs}
    if len(found) < len(pairs):
        raise ValueError(f"{text!r} gives a name twice")
    return found


def _choices(wanted: Any) -> tuple[str, ...]:
    """What there is to choose from, for a type of few values; else nothing."""
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return tuple(str(item.value) for item in wanted)
    if typing.get_origin(wanted) is typing.Literal:
        return tuple(map(str, typing.get_args(wanted)))
    return ()


def _path(wanted: type[Any], value: Any) -> Path:
    """A path from text, also inside lists: the converter does not know them."""
    if wanted is not Path:
        raise NotImplementedError(f"settings have no {wanted}")
    if value == "":  # else it would be the working directory
        raise ValueError("must not be empty")
    path = Path(value if isinstance(value, (str, Path)) else _converted(value, str, strict=True))
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(f"{str(path)!r} begins with a user who has no home here; write the whole path") from None


def _converted(value: Any, wanted: Any, *, strict: bool) -> Any:
    """A value as that type; ValueError says what is wrong with it."""
    if wanted is str and isinstance(value, str):
        return value
    import msgspec  # here, since a passive round without a settings file converts nothing and is to be quick

    try:
        return msgspec.convert(value, wanted, strict=strict, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def _boolean(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError(f"{text!r} is not true or false")
    return words[text.lower()]
