"""From two YAML files and `KEY=VALUE` overrides to a checked `Config`."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from trainer.config.settings import CONFIG_FILE, FILE_SECTIONS, PROJECT, Config, DataConfig, Invalid, Limits, NoSettings
from trainer.outcome import ConfigError

_COMMAND_LINE = "command line"


def load_config(overrides: Iterable[str] = (), project: Path = PROJECT) -> Config:
    """Read both files below `project`, apply `KEY=VALUE` overrides, check everything.

    Giving `checkpoint.every_steps` as an override turns `checkpoint.retune` off: saves are then at its multiples.

    Raises:
        ConfigError: one line naming the file (or the command line), the key, the value and what would be right.
    """
    values: dict[str, tuple[Any, str]] = {}  # dotted key -> (raw value, where it stands)
    for file in FILE_SECTIONS:
        values |= {key: (value, str(file)) for key, value in _read(project, file).items()}
    given = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"{_COMMAND_LINE}: {override!r} is not KEY=VALUE, such as train.steps=100")
        given[key] = value
    if "checkpoint.every_steps" in given:
        given.setdefault("checkpoint.retune", "false")
    values |= {key: (value, _COMMAND_LINE) for key, value in given.items()}

    name, where = values.pop("task", (Config.task, "default"))
    task = _parse(name, str, where, "task")
    kinds = sections_of(task, where)
    for key, (_, where) in values.items():
        _require_known(key, where, kinds)
    sections = {section: _section(section, kind, values) for section, kind in kinds.items()}
    return Config(**sections, task=task, project=project)


def sections_of(task: str, where: str = "task") -> dict[str, type]:
    """The dataclass of every section, in the files' order; `model` and `data` are those of the task's `settings.py`.

    Raises:
        ConfigError: there is no such task (`where` says who named it), or its settings cannot be used.
    """
    hints = typing.get_type_hints(Config)
    kinds = {section: hints[section] for sections in FILE_SECTIONS.values() for section in sections}
    settings = _settings_of(task, where)
    for section, name, default, base in (
        ("model", "ModelConfig", NoSettings, object),
        ("data", "DataConfig", DataConfig, DataConfig),
    ):
        kinds[section] = kind = getattr(settings, name, default)
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind) and issubclass(kind, base)):
            right = "a frozen dataclass" + (" that extends trainer.task.DataConfig" if section == "data" else "")
            raise ConfigError(f"tasks/{task}/settings.py: {name} is {kind!r}; it must be {right}")
    return kinds


def _settings_of(task: str, where: str) -> types.ModuleType | None:
    """The task's `settings.py`, None where it has none. The launcher reads it, so the task itself, which imports torch,
    is not imported: the file is loaded alone, under the name by which the task will find it."""
    folder = PROJECT / "tasks" / task
    if not re.fullmatch(r"[a-z][a-z0-9_]*", task) or not (folder / "__init__.py").is_file():
        there = ", ".join(sorted(path.parent.name for path in PROJECT.glob("tasks/*/__init__.py")))
        raise ConfigError(f"{where}: task is {task!r}; it must be a folder of tasks/ with an __init__.py ({there})")
    name, file = f"tasks.{task}.settings", folder / "settings.py"
    if name in sys.modules or not file.is_file():
        return sys.modules.get(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # before it runs: its dataclasses look there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"tasks/{task}/settings.py: {what}; it must be importable, without torch") from None
    return module


def _read(project: Path, file: Path) -> dict[str, Any]:
    """What `file` holds, by dotted key; nothing where there is no such file."""
    import yaml

    try:
        tree = yaml.safe_load((project / file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); it must be a readable YAML file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"{file}{line}: {problem}; it must be valid YAML") from None
    except (ValueError, RecursionError) as error:  # no such date, a number of 5,000 digits, endless brackets
        raise ConfigError(f"{file}: a value in it cannot be read ({error}); it must be valid YAML") from None
    sections = FILE_SECTIONS[file]
    if not isinstance(tree, Mapping | None):
        raise ConfigError(f"{file}: holds {tree!r}; it must be sections of keys ({', '.join(sections)})")
    values: dict[str, Any] = {}
    for section, body in (tree or {}).items():
        if section == "task" and file == CONFIG_FILE:
            values["task"] = body
        elif section not in sections:
            others = [str(other) for other, names in FILE_SECTIONS.items() if section in names]
            hint = f"it belongs in {others[0]}" if others else f"the sections are {', '.join(sections)}"
            raise ConfigError(f"{file}: unknown key {section!r}; {hint}")
        elif not isinstance(body, Mapping | None):
            raise ConfigError(f"{file}: {section} is {body!r}; it must be a section of keys")
        else:
            values |= {f"{section}.{name}": value for name, value in (body or {}).items()}
    return values


def _require_known(key: str, where: str, kinds: Mapping[str, type]) -> None:
    import difflib

    section, _, name = key.partition(".")
    fields = {section: [each.name for each in dataclasses.fields(kind)] for section, kind in kinds.items()}
    if name in fields.get(section, ()):
        return
    if close := difflib.get_close_matches(name, fields.get(section, ()), n=1):
        hint = f"did you mean {section}.{close[0]}?"
    elif section in kinds:
        hint = f"{section} has {', '.join(fields[section]) or 'no keys'}"
    elif close := difflib.get_close_matches(section, kinds, n=1):
        hint = f"did you mean the section {close[0]}?"
    else:
        hint = f"the sections are {', '.join(kinds)}"
    raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def _section(section: str, kind: type, values: Mapping[str, tuple[Any, str]]) -> Any:
    """The dataclass of one section, from the values that are given."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {}
    for each in dataclasses.fields(kind):
        key = f"{section}.{each.name}"
        if key in values:
            value, where = values[key]
            fields[each.name] = _parse(value, hints[each.name], where, key)
        elif each.default is each.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{CONFIG_FILE}: {key} is missing; it has no default")
    try:
        return kind(**fields)
    except Invalid as invalid:
        key = f"{section}.{invalid.name}"
        value, where = values.get(key, (getattr(kind, invalid.name, None), "default"))
        raise ConfigError(f"{where}: {key} is {value!r}; it must be {invalid.right}") from None


def _parse(value: Any, hint: Any, where: str, key: str) -> Any:
    """`value` (from YAML, or text from the command line) as a `hint`: the field's type decides, not YAML's guess."""
    kind, *marks = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    choices = {str(one): one for one in typing.get_args(kind)} if typing.get_origin(kind) is Literal else {}
    if not choices and kind not in _PARSERS:
        raise ConfigError(f"{key} has the type {kind}; it must be bool, int, float, str, or a Literal of them")
    parse, right = (choices.__getitem__, f"one of {', '.join(choices)}") if choices else _PARSERS[kind]
    try:
        parsed = parse(str(value).lower() if choices and isinstance(value, bool) else value)
        for limits in (mark for mark in marks if isinstance(mark, Limits)):
            right = limits.right
            if not limits.allow(parsed):
                raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(f"{where}: {key} is {value!r}; it must be {right}") from None
    return parsed


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise TypeError
    return "" if value is None else str(value)


def _number(value: Any) -> float:
    number = float(_text(value))
    if not math.isfinite(number):
        raise ValueError
    return number


def _whole_number(value: Any) -> int:
    number = _number(value)
    if not number.is_integer():
        raise ValueError
    return int(value) if str(value).lstrip("+-").isdigit() else int(number)  # exact beyond 2**53 where written out


_BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
_PARSERS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    bool: (lambda value: _BOOLEANS[str(value).lower()], "true or false"),
    str: (_text, "text"),
    int: (_whole_number, "a whole number"),
    float: (_number, "a finite number"),
}
