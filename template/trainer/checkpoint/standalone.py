"""A run without a launcher: rank 0 holds the lease and writes the launcher's events itself."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from trainer.checkpoint.lease import Lease
from trainer.ledger import Ledger
from trainer.outcome import ConfigError, Reason, UnavailableError
from trainer.steps import read_steps


@contextmanager
def standalone(run_dir: Path, ended: Callable[[], tuple[Reason, int]]) -> Iterator[int]:
    """Be the run's one writer; yields the attempt. Leaving writes `stopped`, and `finished` after the last step.

    Args:
        ended: why the run has stopped and after which step, where it has not failed.

    Raises:
        UnavailableError: another process holds the run.
        OSError
    """
    with Lease.acquire(run_dir) as lease:
        attempt = lease.next_epoch()
        with closing(Ledger(run_dir, attempt)) as ledger:
            ledger.record("started", host=socket.gethostname())
            try:
                yield attempt
            except BaseException as error:
                kinds = {ConfigError: Reason.CONFIG, UnavailableError: Reason.UNAVAILABLE}
                reason = next((kinds[kind] for kind in kinds if isinstance(error, kind)), Reason.CRASHED)
                last = max((step.step for step in read_steps(run_dir)), default=0)
                ledger.record_end(reason, last, f"{type(error).__name__}: {error}")
                raise
            ledger.record_end(*ended())
