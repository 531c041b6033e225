"""The JSON schema of the startup config, made from its dataclasses: `python -m tests.startup_schema` writes it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

from trainer.config.load import sections_of
from trainer.config.settings import FILE_SECTIONS, STARTUP_FILE, Config, Limits
from trainer.outcome import CONFIG

FILE = Path(__file__).parent.parent / "template" / STARTUP_FILE.with_suffix(".schema.json")
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}

# What `__post_init__` asks for beyond the types, as far as a schema can say it.
IMAGE_IS_PINNED = {
    "if": {"properties": {"allow_tag": {"const": True}}, "required": ["allow_tag"]},
    "else": {"properties": {"ref": {"pattern": "^$|@sha256:[0-9a-f]{64}$"}}},
}
IS_NOT_CONFIG = {"not": {"const": CONFIG}}


def schema() -> dict[str, Any]:
    """What an editor needs to complete, explain and check `startup/nexgpu.yaml`."""
    kinds = sections_of(Config.task)
    sections = {name: section(kinds[name]) for name in FILE_SECTIONS[STARTUP_FILE]}
    sections["image"] |= IMAGE_IS_PINNED
    sections["restart"]["properties"]["exit_reclaimed"] |= IS_NOT_CONFIG
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Startup config of a training run",
        "type": "object",
        "additionalProperties": False,
        "properties": sections,
    }


def section(kind: type) -> dict[str, Any]:
    """One section of the file; empty in YAML (null) it takes its defaults."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = dataclasses.fields(kind)
    return {
        "type": ["object", "null"],
        "description": inspect.getdoc(kind),
        "additionalProperties": False,
        "properties": {each.name: field(each.default, hints[each.name], comment(kind, each.name)) for each in fields},
    }


def field(default: Any, hint: Any, description: str) -> dict[str, Any]:
    kind, *marks = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    found: dict[str, Any] = (
        {"enum": list(typing.get_args(kind))} if typing.get_origin(kind) is Literal else {"type": TYPES[kind]}
    )
    if description:
        found["description"] = description
    found["default"] = default
    for limits in (mark for mark in marks if isinstance(mark, Limits)):
        found |= limits.keywords
    if "pattern" in found:
        found["pattern"] = f"^({found['pattern']})$"
    return found


def comment(kind: type, name: str) -> str:
    """What stands behind the field in the source."""
    found = re.search(rf"^    {name}: .*?  # (.*)$", inspect.getsource(kind), re.M)
    return found[1] if found else ""


def written() -> str:
    """The schema as JSON with a field a line, for the eye and for diffs."""
    text = json.dumps(schema(), indent=2)
    for innermost in (r"\[[^][{}]*\]", r"\{[^{}]*\}"):
        text = re.sub(innermost, lambda found: re.sub(r"\s*\n\s*", " ", found[0]), text)
    return text + "\n"


if __name__ == "__main__":
    FILE.write_text(written())
