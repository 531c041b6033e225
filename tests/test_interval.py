"""The save interval from what people write: the questions' Jinja and the project's Python never differ."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import FileSystemLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from scaffold.interval import IntervalError, calculator, mtbi_from_log, parse_duration, parse_share

compute_interval, format_duration = calculator.compute_interval, calculator.format_duration

ROOT = Path(__file__).parent.parent
settings.register_profile("loaded machine", deadline=None)
settings.load_profile("loaded machine")


# The macros of the questions, in an environment like Copier's.
MACROS: Any = (
    SandboxedEnvironment(
        loader=FileSystemLoader(ROOT),
        extensions=["jinja2_ansible_filters.AnsibleCoreFiltersExtension"],
        undefined=StrictUndefined,
    )
    .get_template("template/.macros/interval.jinja")
    .module
)


def answers() -> Iterator[tuple[str, str, str, str, str, str]]:
    """A grid of six answers as people write them: comfortable, tight and impossible ones."""
    yield from itertools.product(
        ("90", "10m", "1h", "4h", "1d12h", "30d"),
        ("1ms", "0.05s", "0.1s", "800ms", "2.5s", "1m", "7m30s"),
        ("100ms", "0.3s", "7s", "30s", "61.7s", "6m"),
        ("0", "10ms", "3s", "30s"),
        ("0s", "5m"),
        ("1%", "5%", "0.333", "90%"),
    )


def from_text(mtbi: str, step: str, save: str, stall: str, restart: str, target: str) -> Any:
    """What Python makes of six answers, in the form of the Jinja macro's JSON."""
    try:
        return compute_interval(
            parse_duration(mtbi),
            parse_duration(step),
            parse_duration(save),
            parse_duration(stall),
            parse_duration(restart),
            parse_share(target),
        )._asdict()
    except IntervalError as error:
        return {"refusal": str(error)}


def test_jinja_and_python_agree_to_the_last_bit_on_thousands_of_answers() -> None:
    outcomes = {"interval": 0, "refusal": 0}
    for given_answers in answers():
        expected = from_text(*given_answers)
        assert json.loads(MACROS.interval(*given_answers)) == expected, given_answers
        outcomes["refusal" if "refusal" in expected else "interval"] += 1
    assert min(outcomes.values()) > 1000, outcomes


positive = st.floats(1e-9, 1e9)


@given(positive, positive, positive, st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1e-6, 1, exclude_max=True))
def test_jinja_and_python_agree_on_any_numbers(
    mtbi: float, step: float, save: float, stall: float, restart: float, target: float
) -> None:
    found = json.loads(MACROS.interval_of(mtbi, step, save, stall, restart, target))
    try:
        expected = compute_interval(mtbi, step, save, stall, restart, target)._asdict()
    except IntervalError as error:
        expected = {"refusal": str(error)}
    assert found == expected


@given(st.floats(1, 1e6), st.floats(1e-3, 1e3), st.floats(0.01, 1e4), st.floats(0, 1e4), st.floats(0.001, 0.99))
def test_what_a_refusal_suggests_is_accepted(
    mtbi: float, step: float, save: float, restart: float, target: float
) -> None:
    values = {"mtbi_s": mtbi, "step_time_s": step, "save_time_s": save}
    values |= {"restart_time_s": restart, "badput_target": target}
    try:
        compute_interval(**values)
        return
    except IntervalError as error:
        text = str(error)
    assert "\n" not in text
    suggestions = re.findall(
        r"(MTBI(?: would have to be)?|target|save time) ([0-9.]+(?:%|[0-9.dhms]*)) or (?:more|less)", text
    )
    assert suggestions, text
    for name, value in suggestions:
        key = {"target": "badput_target", "save time": "save_time_s"}.get(name, "mtbi_s")
        changed = parse_share(value) if key == "badput_target" else parse_duration(value)
        compute_interval(**{**values, key: changed})


DURATIONS = {"4h": 14400, "800ms": 0.8, "0.05s": 0.05, "1d12h": 129600, "90": 90, "1h30m": 5400, " 2m ": 120, "0": 0}
NOT_DURATIONS = [
    "",
    " ",
    "4 hours",
    "h",
    "-1",
    "1e3",
    "nan",
    "1h1d",
    "4h\n5",
    "1:30",
    "٣",
    "5%",
    "9" * 40,
    "1.2.3",
    ".",
]
SHARES = {"5%": 0.05, "0.05": 0.05, "0.5%": 0.005, "99.5%": 0.995, " 5 % ": 0.05, ".05": 0.05}
NOT_SHARES = ["", "%", "5", "1", "0", "0%", "100%", "-5%", "1.5", "nan", "five", "5%%", "1e-2", "5\n%5"]


@pytest.mark.parametrize("text", [*DURATIONS, *NOT_DURATIONS])
def test_durations_are_read_alike(text: str) -> None:
    wrong = MACROS.bad_duration(text, zero=True)
    if text in DURATIONS:
        assert (wrong, float(MACROS.seconds(text)), parse_duration(text)) == ("", DURATIONS[text], DURATIONS[text])
    else:
        assert "is not a duration" in wrong
        with pytest.raises(IntervalError, match="is not a duration"):
            parse_duration(text)


@pytest.mark.parametrize("text", [*SHARES, *NOT_SHARES])
def test_shares_are_read_alike(text: str) -> None:
    wrong = MACROS.bad_share(text)
    if text in SHARES:
        assert (wrong, float(MACROS.share(text)), parse_share(text)) == ("", SHARES[text], SHARES[text])
    else:
        assert "is not a share" in wrong
        with pytest.raises(IntervalError, match="is not a share"):
            parse_share(text)


def test_a_duration_of_zero_is_refused_where_time_must_pass() -> None:
    assert MACROS.bad_duration("0s") == "it must be above 0"
    assert MACROS.bad_duration("0s", zero=True) == ""


@given(st.floats(0, 1e9))
def test_a_duration_is_written_alike_and_reads_back(seconds: float) -> None:
    text = format_duration(seconds)
    assert MACROS.duration(seconds) == text
    assert parse_duration(text) == pytest.approx(seconds, abs=1e-9 if seconds < 0.9995 else 0.001)


def test_an_mtbi_is_estimated_from_a_log(tmp_path: Path) -> None:
    log = tmp_path / "interruptions.log"
    log.write_text(
        "# reclaimed at\n2026-11-01T00:00:00Z node-3\n\n2026-11-01 04:00:00 spot reclaim\n1793505600\n"
        "2026-11-01T14:00:00+02:00\n"
    )
    assert mtbi_from_log(log) == 4 * 3600


@pytest.mark.parametrize("text", ["", "1000\n", "1000\n1000\n", "yesterday\n", "1000\nnan\n"])
def test_a_log_that_says_nothing_is_refused(text: str, tmp_path: Path) -> None:
    log = tmp_path / "interruptions.log"
    log.write_text(text)
    with pytest.raises(IntervalError, match=re.escape(str(log))):
        mtbi_from_log(log)


def test_a_log_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntervalError, match="cannot be read"):
        mtbi_from_log(tmp_path / "none")
