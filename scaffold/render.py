"""Calls of Copier: its arguments, its results and its errors, in one place."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from scaffold import Refused


@dataclass(frozen=True)
class Rendered:
    """What a run of Copier knew at its end."""

    questions: Mapping[str, Mapping[str, Any]]  # as they stand in copier.yml
    answers: Mapping[str, Any]  # to the questions that are asked
    derived: Mapping[str, Any]  # computed from them, never asked
    commit: str | None  # as `_commit` will have it; None: the project could not be updated


def render(
    url: str,
    ref: str | None,
    target: Path,
    answers: Mapping[str, Any],
    *,
    defaults: bool,
    write: bool = True,
) -> Rendered:
    """Ask what `answers` leaves open (nothing with `defaults`) and render into `target`, or only ask without `write`.

    Raises what Copier raises: call it within `one_line_errors`.
    """
    from copier import run_copy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        worker = run_copy(
            url,
            target,
            data=dict(answers),
            vcs_ref=ref,
            defaults=defaults,
            pretend=not write,
            exclude=() if write else ("*",),
            overwrite=True,
            quiet=True,
            unsafe=False,
        )
    questions = worker.template.questions_data
    known = {key: value for key, value in worker.answers.combined.items() if key in questions}
    hidden = worker.answers.hidden
    return Rendered(
        questions=questions,
        answers={key: value for key, value in known.items() if key not in hidden},
        derived={key: value for key, value in known.items() if key in hidden},
        commit=worker.template.commit,
    )


def is_derived(question: Mapping[str, Any]) -> bool:
    """Whether a question of copier.yml is a computed value."""
    return question.get("when", True) is False


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn whatever Copier, Jinja, YAML and git raise for a user's mistake into one line and the right exit code."""
    import yaml
    from copier.errors import CopierError, InteractiveSessionError
    from jinja2 import TemplateError

    try:
        yield
    except (Refused, click.ClickException):
        raise
    except KeyboardInterrupt as error:  # Copier's own interrupt is one
        raise click.Abort from error
    except InteractiveSessionError as error:
        raise click.UsageError(f"there is no terminal to ask on: {error}") from error
    except (CopierError, TemplateError, yaml.YAMLError, ValueError, TypeError, OSError) as error:
        raise Refused(reason(error)) from error


def reason(error: BaseException) -> str:
    """One line for an error of Copier's, in the words of this product where Copier's own would mislead."""
    complaint = getattr(error, "stderr", None)  # of a command that failed
    if isinstance(complaint, str) and complaint.strip():
        return f"git failed: {complaint.strip().splitlines()[-1]}"
    text = " ".join(str(error).split())
    if text.startswith("Unknown revision"):
        return f"the template has no such commit ({text}): name another one, or fetch it into the template first"
    if text == "Local template must be a directory.":
        return "the template is not where it was (_src_path in .copier-answers.yml): put it back or correct that line"
    return text or type(error).__name__
