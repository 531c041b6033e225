"""All that a checkpoint holds of a run, as flat names and tensors, and back.

Names do not depend on the layout: FSDP2, HSDP, DDP and one process save and load the same ones. The optimizer's state
is keyed by parameter name and taken as it is, so nothing is ever stepped to find out what it would look like:
a parameter without state (no gradient yet) is absent from the checkpoint, and stays without state after a resume.
Hyper-parameters (learning rate, decay) are functions of the configuration and the step, and are not stored.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.data.order import derive_seed
from trainer.optim import AveragedWeights


class TrainState:
    """Everything that training changes. `step` and `samples` count completed optimizer steps and their samples."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        averages: AveragedWeights | None,
        *,
        rank: int,
        seed: int,
        fingerprint: dict[str, Any],
    ) -> None:
        self.model, self.optimizer, self.averages = model, optimizer, averages
        self.rank, self.seed, self.fingerprint = rank, seed, fingerprint
        self.step = self.samples = 0
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._loading: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Flat `{name: tensor}`; parameters and optimizer state are the live ones, for a save to copy before the next
        update. Buffers are copies: a forward pass may change them."""
        state = self._live()
        parameters = {f"model.{name}" for name, _ in self.model.named_parameters(remove_duplicate=False)}
        state = {
            name: value.clone() if name.startswith("model.") and name not in parameters else value
            for name, value in state.items()
        }
        for parameter, values in self.optimizer.state.items():
            for name, value in values.items():
                state[f"optim.{self.names[parameter]}.{name}"] = value
        state |= {f"rng.rank{self.rank}.{name}": tensor for name, tensor in _rng_state().items()}
        return state

    def _live(self) -> dict[str, Tensor]:
        state = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        if self.averages is not None:
            state |= {f"ema.{name}": tensor for name, tensor in self.averages.averages.items()}
        for name in ("step", "samples", "seed"):
            state[f"progress.{name}"] = torch.tensor(getattr(self, name))
        return state

    def target(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """What to load into: `saved` gives the names in the checkpoint and of each `.size` and `.properties.dtype`.

        Model, averages and progress are the live tensors; optimizer state is made for the parameters that have some
        in the checkpoint; random-number states are those of this rank, if it was there. Averages that are new
        (`optim.ema_decay` was accepted) start from the weights, and those no longer wanted are dropped. Whoever loads
        checks that the names, shapes and types are those of the checkpoint.
        """
        parameters = {name: parameter for parameter, name in self.names.items()}
        target = self._live()
        averaged = {name for name in saved if name.startswith("ema.")}
        if not averaged:
            target = {name: value for name, value in target.items() if not name.startswith("ema.")}
        for name, entry in saved.items():
            kind, _, rest = name.partition(".")
            parameter, _, field = rest.rpartition(".")
            if kind == "optim" and parameter in parameters:
                alike = field != "step" and tuple(entry.size) == tuple(parameters[parameter].shape)
                target[name] = torch.zeros_like(parameters[parameter].detach()) if alike else _zeros(entry)
            elif kind == "ema" and self.averages is None and rest in parameters:
                target[name] = torch.zeros_like(parameters[rest].detach())
            elif name.startswith(f"rng.rank{self.rank}."):
                target[name] = _zeros(entry)
        self._loading = target
        return target

    def loaded(self) -> None:
        """Take over what was loaded into `target()` (model and averages were loaded in place).

        Ranks that the checkpoint did not have draw new streams, derived from the seed.
        """
        target, self._loading = self._loading, {}
        parameters = {name: parameter for parameter, name in self.names.items()}
        steps_on_device = {
            parameter: bool(group.get("fused") or group.get("capturable"))
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }
        self.optimizer.state.clear()
        for key, value in target.items():
            if key.startswith("optim."):
                name, _, field = key.removeprefix("optim.").rpartition(".")
                parameter = parameters[name]
                moves = field != "step" or steps_on_device[parameter]
                self.optimizer.state[parameter][field] = value.to(parameter.device) if moves else value
        if self.averages is not None and not any(key.startswith("ema.") for key in target):
            self.averages.restart()
        self.step = int(target["progress.step"])
        self.samples = int(target["progress.samples"])
        seed_all(derive_seed("resume", self.seed, self.step, self.rank))
        mine = f"rng.rank{self.rank}."
        _restore_rng({key.removeprefix(mine): value for key, value in target.items() if key.startswith(mine)})


def _zeros(saved: Any) -> Tensor:
    return torch.zeros(tuple(saved.size), dtype=saved.properties.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Random-number streams, for code of the user's own: the trainer itself seeds each micro-batch (see `run.py`)


def seed_all(seed: int) -> None:
    """Seed torch (CPU and devices), numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _rng_state() -> dict[str, Tensor]:
    """The states of this rank's generators as plain tensors, so that loading them unpickles nothing."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy_words": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
        "python_words": torch.tensor(words, dtype=torch.int64),
        "python_rest": torch.tensor([version, next_gauss is not None, next_gauss or 0.0], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_rng(state: Mapping[str, Tensor]) -> None:
    if not state:
        return
    torch.set_rng_state(state["torch"])
    position, has_gauss, gauss = state["numpy_rest"].tolist()
    words = state["numpy_words"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, int(position), int(has_gauss), gauss))
    version, has_next, next_gauss = state["python_rest"].tolist()
    random.setstate((int(version), tuple(state["python_words"].tolist()), next_gauss if has_next else None))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
