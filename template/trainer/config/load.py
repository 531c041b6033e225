"""From two YAML files and `KEY=VALUE` overrides to a checked `Config`."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from trainer.config.settings import FILE_SECTIONS, PROJECT, Config, Invalid, sections_of
from trainer.outcome import ConfigError


def load_config(overrides: Iterable[str] = (), project: Path = PROJECT) -> Config:
    """Read both files below `project`, apply `KEY=VALUE` overrides, check everything.

    Giving `checkpoint.every_steps` as an override turns `checkpoint.retune` off: saves are then at its multiples.

    Raises:
        ConfigError: one line naming the file (or the command line), the key, the value and what would be right.
    """
    values: dict[str, tuple[Any, str]] = {}  # dotted key -> (raw value, where it stands)
    for file, names in FILE_SECTIONS.items():
        for key, value in _read(project / file, file, names).items():
            values[key] = (value, str(file))
    overrides = list(overrides)
    for override in overrides:
        if override.startswith("task="):
            values["task"] = (override.removeprefix("task="), "command line")
    task, where = values.pop("task", (Config.task, "default"))
    try:
        kinds = sections_of(str(task))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    for key, (_, where) in values.items():
        _known(key, where, kinds)
    given = set()
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"command line: {override!r} is not KEY=VALUE, such as train.steps=100")
        if key != "task":
            _known(key, "command line", kinds)
            values[key] = (value, "command line")
            given.add(key)
    if "checkpoint.every_steps" in given and "checkpoint.retune" not in given:
        values["checkpoint.retune"] = (False, "command line")

    sections: dict[str, Any] = {}
    for section, kind in kinds.items():
        hints = typing.get_type_hints(kind)
        fields = {}
        for name in hints:
            if f"{section}.{name}" in values:
                value, where = values[f"{section}.{name}"]
                fields[name] = _parse(value, hints[name], where, f"{section}.{name}")
        try:
            sections[section] = kind(**fields)
        except Invalid as invalid:
            key = f"{section}.{invalid.name}"
            value, where = values.get(key, (getattr(kind, invalid.name, None), "default"))
            raise ConfigError(f"{where}: {key} is {value!r}; it must be {invalid.right}") from None
    return Config(**sections, task=str(task), project=project)


def _read(path: Path, shown: Path, sections: tuple[str, ...]) -> dict[str, Any]:
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown}: cannot be read ({error}); it must be a readable YAML file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"{shown}{line}: {problem}; it must be valid YAML") from None
    except (ValueError, RecursionError) as error:  # no such date, a number of 5,000 digits, endless brackets
        raise ConfigError(f"{shown}: a value in it cannot be read ({error}); it must be valid YAML") from None
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{shown}: holds {tree!r}; it must be sections of keys ({', '.join(sections)})")
    values: dict[str, Any] = {}
    for section, body in tree.items():
        if section == "task" and "model" in sections:
            values["task"] = body
            continue
        if section not in sections:
            others = [str(file) for file, names in FILE_SECTIONS.items() if section in names]
            hint = f"it belongs in {others[0]}" if others else f"the sections are {', '.join(sections)}"
            raise ConfigError(f"{shown}: unknown key {section!r}; {hint}")
        if body is not None and not isinstance(body, Mapping):
            raise ConfigError(f"{shown}: {section} is {body!r}; it must be a section of keys")
        for name, value in (body or {}).items():
            values[f"{section}.{name}"] = value
    return values


def _known(key: str, where: str, kinds: Mapping[str, type]) -> None:
    import difflib

    section = key.partition(".")[0]
    every = [f"{one}.{each.name}" for one, kind in kinds.items() for each in dataclasses.fields(kind)]
    if key in every:
        return
    close = difflib.get_close_matches(key, every, n=1, cutoff=0.6)
    if close:
        hint = f"did you mean {close[0]}?"
    elif section in kinds:
        hint = f"{section} has {', '.join(each.name for each in dataclasses.fields(kinds[section]))}"
    else:
        hint = f"the sections are {', '.join(kinds)}"
    raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


def _parse(value: Any, kind: Any, where: str, key: str) -> Any:
    """`value` (from YAML, or text from the command line) as a `kind`: the field's type decides, not YAML's guess."""

    def wrong(right: str) -> ConfigError:
        return ConfigError(f"{where}: {key} is {value!r}; it must be {right}")

    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(one for one in typing.get_args(kind) if one is not type(None))
    if typing.get_origin(kind) is Literal:
        allowed = typing.get_args(kind)
        value = str(value).lower() if isinstance(value, bool) else value
        if value not in allowed:
            raise wrong(f"one of {', '.join(allowed)}")
        return value
    if kind is bool:
        text = str(value).lower()
        if isinstance(value, bool | str) and text in _TRUE | _FALSE:
            return text in _TRUE
        raise wrong("true or false")
    if kind is str:
        if value is None:
            return ""
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        raise wrong("text")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise wrong("a whole number" if kind is int else "a number")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise wrong("a whole number" if kind is int else "a number") from None
    if not math.isfinite(number):
        raise wrong("a finite number")
    if kind is int:
        if not number.is_integer():
            raise wrong("a whole number")
        return int(number) if not isinstance(value, str) or not value.lstrip("+-").isdigit() else int(value)
    return number
