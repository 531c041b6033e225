"""`ranks` is the one of the tests that every project has."""

from __future__ import annotations

from ranks import ranks

__all__ = ["ranks"]
