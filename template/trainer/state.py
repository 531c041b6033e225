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

from trainer.data import derive_seed
from trainer.optim import AveragedWeights
from trainer.outcome import ConfigError


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

    def state_dict(self) -> dict[str, Any]:
        """Flat `{name: tensor}`, the tensors being the live ones: a save has to copy them before the next update."""
        state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for parameter, values in self.optimizer.state.items():
            for name, value in values.items():
                state[f"optim.{self.names[parameter]}.{name}"] = value
        if self.averages is not None:
            state |= {f"ema.{name}": tensor for name, tensor in self.averages.averages.items()}
        state["progress.step"] = torch.tensor(self.step)
        state["progress.samples"] = torch.tensor(self.samples)
        state["progress.seed"] = torch.tensor(self.seed)
        state |= {f"rng.rank{self.rank}.{name}": tensor for name, tensor in _rng_state().items()}
        return state

    def target(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """What to load into: `saved` gives the names in the checkpoint and each one's shape (any value with `.size`).

        Model, averages and progress are the live tensors or must match them; optimizer state is made for the
        parameters that have some in the checkpoint; random-number states are those of this rank, if it was there.
        """
        target = {name: value for name, value in self.state_dict().items() if not name.startswith(("optim.", "rng."))}
        parameters = {name: parameter for parameter, name in self.names.items()}
        for key in saved:
            if key.startswith("optim."):
                name, _, field = key.removeprefix("optim.").rpartition(".")
                if name not in parameters:
                    raise ConfigError(
                        f"the checkpoint has optimizer state for {name!r} and the model has no such parameter; "
                        f"load it with the model that it was saved from"
                    )
                parameter = parameters[name]
                like = tuple(saved[key].size) == tuple(parameter.shape) and parameter.ndim > 0 and field != "step"
                target[key] = torch.zeros_like(parameter.detach()) if like else _zeros(saved[key])
            elif key.startswith(f"rng.rank{self.rank}."):
                target[key] = _zeros(saved[key])
        self._loading = target
        return target

    def loaded(self) -> None:
        """Take over what was loaded into `target()` (model and averages were loaded in place).

        Ranks that the checkpoint did not have draw new streams, derived from the seed.
        """
        target, self._loading = self._loading, {}
        parameters = {name: parameter for parameter, name in self.names.items()}
        self.optimizer.state.clear()
        for key, value in target.items():
            if key.startswith("optim."):
                name, _, field = key.removeprefix("optim.").rpartition(".")
                parameter = parameters[name]
                if field == "step" and _steps_on_device(self.optimizer, parameter):
                    value = value.to(parameter.device)
                self.optimizer.state[parameter][field] = value
        self.step = int(target["progress.step"])
        self.samples = int(target["progress.samples"])
        rng = {key.removeprefix(f"rng.rank{self.rank}."): value for key, value in target.items() if key[:4] == "rng."}
        if rng:
            _restore_rng(rng)
        else:
            seed_all(derive_seed("resume", self.seed, self.step, self.rank))


def _zeros(saved: Any) -> Tensor:
    return torch.zeros(tuple(saved.size), dtype=saved.properties.dtype)


def _steps_on_device(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    group = next(group for group in optimizer.param_groups if any(parameter is one for one in group["params"]))
    return bool(group.get("fused") or group.get("capturable"))


# ---------------------------------------------------------------------------------------------------------------------
# Random-number streams, for code of the user's own: the trainer itself seeds each micro-batch (see `train.py`)


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
    torch.set_rng_state(state["torch"])
    position, has_gauss, gauss = state["numpy_rest"].tolist()
    words = state["numpy_words"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, int(position), int(has_gauss), gauss))
    version, has_next, next_gauss = state["python_rest"].tolist()
    random.setstate((int(version), tuple(state["python_words"].tolist()), next_gauss if has_next else None))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
