"""How figures read in a sentence or a table: counts with their noun, durations, shares, bytes."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 step`, `3 steps`; `plural` where it is not the noun with an s (`batch`, `batches`)."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def span(seconds: float | None) -> str:
    """Seconds to three figures in the unit that a person would use, `-` for None.

    For reading: `interval.format_duration` writes them exactly, as the questions take them.
    """
    if seconds is None:
        return "-"
    for limit, divisor, unit in ((0.9995, 0.001, "ms"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{_three_figures(seconds / divisor)} {unit}" if seconds else "0 s"
    return f"{_three_figures(seconds / 86_400)} d"


def percent(share: float) -> str:
    """A share of 1 as a percentage: `2.05%`, `12.3%`."""
    return f"{share:.2%}" if share < 0.1 else f"{share:.1%}"


def size(count: float) -> str:
    """Bytes to three figures: `1.5 MB`, `16.2 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _three_figures(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
