"""Hatchling's hook: what a wheel and an sdist carry besides the package itself.

A wheel gets the template as a git bundle and a copy of the template's interval calculator. An sdist gets the bundle
too, since it has no history of its own.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CarryTemplate(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the bundle (and to a wheel the calculator) to what is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # an editable install reads the checkout itself
            return
        root = Path(self.root)
        sys.path.insert(0, self.root)
        from scaffold import bundle
        from scaffold.git import succeeds

        built = Path(tempfile.mkdtemp(prefix="scaffold-build-")) / bundle.NAME
        carried = root / "scaffold" / bundle.NAME
        if succeeds("rev-parse", "--verify", "HEAD:copier.yml", cwd=root) and (root / ".git").exists():
            bundle.from_history(root, built)
        elif carried.is_file():  # this is an unpacked sdist
            built = carried
        else:
            raise RuntimeError(f"{root} has neither a git history nor {carried.name}: build it from a git clone")
        build_data["force_include"][str(built)] = f"scaffold/{bundle.NAME}"
        if self.target_name == "wheel":
            build_data["force_include"][str(root / "template/trainer/interval.py")] = "scaffold/_interval.py"
