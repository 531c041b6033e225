"""The engine's README is its map: every file is on it, and every file and function that it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import trainer
from tests.engine.test_layers import ROWS

ENGINE = Path(trainer.__file__).resolve().parent
TEXT = (ENGINE / "README.md").read_text()
# `path.py: function`, `path.py: Class.method`
FUNCTIONS = sorted(set(re.findall(r"`([a-z_/]+\.py): ([A-Za-z_.]+)`", TEXT)))


def _find(path: str) -> Path:
    """The file, whose path is that below the engine or, for a task's, below the project."""
    return next((found for root in (ENGINE, ENGINE.parent) if (found := root / path).is_file()), ENGINE / path)


@pytest.mark.parametrize(("path", "name"), FUNCTIONS)
def test_every_function_that_the_map_names_is_there(path: str, name: str) -> None:
    body = ast.parse(_find(path).read_text()).body
    for part in name.split("."):
        found = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part]
        assert found, f"{path} has no {part}"
        body = found[0].body


def test_every_file_of_the_engine_is_on_the_map_and_no_other() -> None:
    table = TEXT.partition("## The files")[2].partition("## ")[0]
    listed = re.findall(r"`([a-z_/]+\.py)`", table)
    there = {
        path.relative_to(ENGINE).as_posix()
        for path in ENGINE.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    assert len(listed) == len(set(listed))
    assert set(listed) == there


def test_the_layers_on_the_map_are_those_that_the_imports_are_held_to() -> None:
    drawing = re.search(r"^```\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert drawing
    rows = [{word.removesuffix(".py").removesuffix("/") for word in line.split()} for line in drawing[1].splitlines()]
    assert rows == ROWS


def test_the_map_has_four_walks_of_named_functions() -> None:
    walks = TEXT.partition("## Four walks")[2].split("\n**")[1:]
    assert len(walks) == 4
    for walk in walks:
        assert len(re.findall(r"`[a-z_/]+\.py: ", walk)) >= 5
