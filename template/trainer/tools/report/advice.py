"""What to change in the startup config after what a run has measured."""

from __future__ import annotations

from trainer.config.settings import CheckpointConfig
from trainer.interval import IntervalError, compute_interval, format_duration
from trainer.tools.report.account import Account
from trainer.tools.report.history import RECLAIMED
from trainer.wording import counted


def suggestions(found: Account, settings: CheckpointConfig, grace_s: float) -> list[str]:
    """One line each; none where the assumptions hold."""
    lines = []
    assumptions = {one.key.removeprefix("checkpoint."): one for one in found.assumptions}
    values = {name: one.assumed for name, one in assumptions.items()}
    off = {name: one for name, one in assumptions.items() if one.off}
    for name, one in off.items():
        values[name] = float(f"{one.measured:.2g}")
        lines.append(f"{one.key}: {values[name]:.15g} instead of {one.assumed:.15g} (measured over {one.over})")
    if off:
        try:
            steps = compute_interval(**values, badput_target=settings.badput_target).save_interval_steps
        except IntervalError as error:
            lines.append(f"with what was measured {error}")
        else:
            if steps != settings.every_steps:
                lines.append(f"checkpoint.every_steps: {steps} instead of {settings.every_steps} follows from that")
            answers = [name for name in values if values[name] != getattr(settings, name)]
            data = " ".join(f"--data {name.removesuffix('_s')}={format_duration(values[name])}" for name in answers)
            lines.append(f"all of that at once: copier update --vcs-ref=:current: {data}")
    unsaved = [one for one in found.run.interruptions if one.kind == RECLAIMED and one.lost_steps]
    if unsaved:
        took, lost = found.durable_s.median, sum(one.lost_steps for one in unsaved)
        lines.append(
            f"reclaim.grace_s: {counted(len(unsaved), 'reclaim')} lost {counted(lost, 'step')}; "
            + (f"a save takes {took:.1f} s, " if took else "")
            + f"the grace period is {grace_s:g} s: raise it on the platform and here where that is possible"
        )
    if failed := sum(save.outcome == "failed" for save in found.run.saves):
        lines.append(
            f"{counted(failed, 'save')} failed, with the reasons above: check the disk, run `python -m trainer doctor`"
        )
    return lines
