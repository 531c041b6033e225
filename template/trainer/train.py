"""The training loop: to the last step, or to the step at which all ranks agree to stop.

`python -m trainer train [KEY=VALUE ...]` is one rank; `launch` starts as many as there are GPUs.
"""

from __future__ import annotations

from trainer.config.settings import Config
from trainer.evaluate import evaluate
from trainer.outcome import Reason
from trainer.run import Run, Start
from trainer.task import Task


def train(config: Config, task: Task, start: Start | None = None) -> tuple[Reason, int]:
    """Train from the newest complete checkpoint, or from the start where there is none.

    Returns:
        Why training stopped, and after which step.
    """
    with Run.of_task(config, task, start) as run:  # joins the ranks, lays the model out, resumes
        for _ in run:  # ends at the last step, or where all ranks agree to stop
            for batch in run.batches():  # this rank's micro-batches of the global batch
                run.backward(task.loss(run.model, batch))  # sums, never means
            decision = run.update()  # one reduction over all ranks: sums, requests to stop, saves that are due
            if decision.evaluate:
                run.record(evaluate(run))
            if decision.save:  # at the interval, on request, before a stop, at the end
                run.save()  # in the background; leaving the loop waits for it
    return run.reason, run.step
