"""The engine's layers, as its imports show them, wherever in a file they stand."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainer

ENGINE = Path(trainer.__file__).resolve().parent
PROJECT = ENGINE.parent
# A row may import itself and what is below it. A package is named by its folder.
ROWS = [
    {"__main__"},
    {"cli"},
    {"launch", "tools"},
    {"train", "evaluate"},
    {"run"},
    {"checkpoint", "parallel", "state", "metrics", "agreement", "data"},
    {"task"},
    {"optim"},
    {"reclaim", "storage", "ledger", "records", "steps", "collectives", "machine"},
    {"config"},
    {"interval", "outcome", "processes", "streams", "versions", "wording"},
]
ROW = {name: number for number, row in enumerate(ROWS) for name in row}
# Torch's names with an underscore that have no public twin. The operations on lists of tensors are documented ones.
TORCH_LISTS = "_foreach_"
TORCH_PRIVATE = {
    "parallel.py": {"_inductor"},
    "data/loader.py": {"_pytree"},
}
# What a task may import of the engine, and what it still imports besides.
TASK_IMPORTS = {"trainer.task", "trainer.run"}
TASK_IMPORTS_BESIDES: set[str] = set()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def _imports(path: Path) -> Iterator[str]:
    """Every module that the file imports, dotted; for `from a import b` both `a` and `a.b`, since `b` may be one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: imports are absolute"
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def _layers(path: Path) -> set[str]:
    """The layers' names that a file of the engine imports."""
    words = [name.split(".") for name in _imports(path)]
    return {found[1] for found in words if found[0] == "trainer" and len(found) > 1}


@pytest.mark.parametrize("path", _files(ENGINE), ids=lambda path: str(path.relative_to(ENGINE)))
def test_imports_point_down(path: Path) -> None:
    mine = path.relative_to(ENGINE).parts[0].removesuffix(".py")
    if mine == "__init__":
        assert not _layers(path)
        return
    assert {mine, *_layers(path)} <= ROW.keys(), "a module without a place among the layers: give it one in ROWS"
    upward = {name for name in _layers(path) if ROW[name] < ROW[mine]}
    assert not upward, f"{path.name} imports {upward}, which lie above {mine}"
    if mine in ("launch", "tools"):
        assert not _layers(path) & ({"launch", "tools"} - {mine}), (
            "the launcher and the tools know nothing of each other"
        )


def test_what_torch_keeps_private_is_used_in_one_folder() -> None:
    for path in _files(ENGINE):
        name = path.relative_to(ENGINE).as_posix()
        if name.startswith("checkpoint/dcp/"):
            continue
        tree = ast.parse(path.read_text())
        found = {part for full in _imports(path) if full.startswith("torch.") for part in full.split(".")}
        found |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0] in ("torch", "dist")
        }
        private = {part for part in found if part.startswith("_") and not part.startswith(("__", TORCH_LISTS))}
        assert private <= TORCH_PRIVATE.get(name, set()), f"{name} uses {private} of torch"


def test_tasks_import_the_protocol_and_nothing_else_of_the_engine() -> None:
    for path in _files(PROJECT / "tasks"):
        found = {".".join(name.split(".")[:2]) for name in _imports(path) if name.startswith("trainer.")}
        assert found <= TASK_IMPORTS | TASK_IMPORTS_BESIDES, f"{path.relative_to(PROJECT)} imports {found}"
