"""torchrun, except that it dies with the launcher that started it and writes down how its ranks ended.

`python -m trainer.torchrun LAUNCHER_PID RUNTIME SECONDS [torchrun's arguments]`; SECONDS pass between its SIGTERM to
the ranks and its SIGKILL. Its exit code means nothing: torchrun's is 1 for a reclaim, a crash and a wrong
configuration alike.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from trainer.processes import die_with_parent

REPORT = "torchrun.json"


def main() -> int:
    parent, runtime, seconds, *arguments = sys.argv[1:]
    die_with_parent(int(parent))

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig

    # SIGUSR1 would end torchrun and leave the ranks as orphans. Older versions know neither option.
    for name, option in (
        ("shutdown_timeout", f"--shutdown-timeout={seconds}"),
        ("signals_to_handle", "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"),
    ):
        if name in LaunchConfig.__dataclass_fields__:
            arguments.insert(0, option)
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        return _report(Path(runtime), failures=failures)
    except SignalException as error:
        return _report(Path(runtime), signal=int(error.sigval))
    except Exception as error:  # the rendezvous: nodes that do not come, an address that does not answer
        return _report(Path(runtime), error=f"{type(error).__name__}: {error}")
    return 0


def _report(runtime: Path, **what: Any) -> int:
    (runtime / REPORT).write_text(json.dumps(what))
    return 1


if __name__ == "__main__":
    sys.exit(main())
