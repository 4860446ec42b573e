"""AdamW, or Muon for matrices, on fp32 masters; the learning rate's schedule.

The draft computes in its own dtype; the optimizer sees fp32 copies. Without them a bfloat16 weight of 1.0 cannot take
an update below 0.004 and training stalls. The cost is 12 bytes a parameter (master and two moments), 8 where Muon's
one momentum takes their place; Muon pays with some 30 matrix products for each matrix and step. Gradients are summed
over accumulation in fp32, too, and over ranks once a step.

Of a sharded draft (sharding.py) the masters are the draft's own parameters, each rank's share of them, and FSDP2 does
what is done here by hand otherwise: it casts them for the forward and sums the gradients over accumulation and ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from tasks.trainer.config import Train
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.errors import InputError
from tasks.trainer.train.parallel import Layout, sum_gradients
from tasks.trainer.train.sharding import is_sharded, shared_out, whole_tensor

# What AdamW and Muon keep of a parameter between steps, besides AdamW's count of steps.
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class Optimizer:
    """AdamW with masters for one draft; Muon for its matrices where the config says so.

    masters: fp32 copies of the draft's trainable parameters by name. `collect` moves the gradients of one backward
    into them, `step` sums them over the ranks, clips, updates, and writes the masters back into the draft.
    """

    def __init__(
        self, draft: Eagle3Draft, masters: dict[str, Tensor], config: Train, *, layout: Layout | None = None
    ) -> None:
        """masters: whole tensors by name, the same on every rank. layout: of several ranks."""
        self._layout = layout or Layout()
        self._sharded = is_sharded(draft)
        self._parameters = dict(draft.named_parameters())
        if self._sharded:
            shared_out(masters, self._parameters)
            self.masters = self._parameters
        else:
            self.masters = {
                name: nn.Parameter(masters[name].to(parameter.device, torch.float32).clone())
                for name, parameter in self._parameters.items()
            }
        matrices = [name for name in self.masters if config.optimizer == "muon" and self._is_inner_matrix(name)]
        rest = [master for name, master in self.masters.items() if name not in matrices]
        self.adam = torch.optim.AdamW(
            [
                {"params": [master for master in rest if master.ndim > 1], "weight_decay": config.weight_decay},
                {"params": [master for master in rest if master.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=config.adam_betas,
            fused=True,
        )
        self._optimizers: list[torch.optim.Optimizer] = [self.adam]
        if matrices:
            self._optimizers.append(make_muon([self.masters[name] for name in matrices], config))
        self._schedules = [make_schedule(optimizer, config) for optimizer in self._optimizers]
        self._max_grad_norm = config.max_grad_norm
        self._write_back()

    def collect(self) -> None:
        """Add the draft's gradients to the masters' and free them."""
        if self._sharded:
            return
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            master = self.masters[name]
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad + gradient
            parameter.grad = None

    def step(self, *, check: Callable[[float], None] | None = None) -> float:
        """One update; returns the gradient's global norm before clipping.

        check: sees the norm before anything is updated, and may raise; norm and update are the same on every rank.
        """
        masters = list(self.masters.values())
        if not self._sharded and self._layout.world_size > 1:
            for master in masters:
                if master.grad is None:  # no pack of this rank reached it; others' may have
                    master.grad = torch.zeros_like(master)
            sum_gradients(self._layout, [master.grad for master in masters if master.grad is not None])
        gradients = [master.grad for master in masters if master.grad is not None]
        total_norm = whole_tensor(torch.nn.utils.get_total_norm(gradients))
        torch.nn.utils.clip_grads_with_norm_(masters, self._max_grad_norm, total_norm)
        norm = float(total_norm)
        if check is not None:
            check(norm)
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        self._write_back()
        return norm

    @property
    def head_master(self) -> Tensor | None:
        """The head's master, for a loss that gives its gradient in float32; None where its owner is FSDP."""
        return None if self._sharded else self.masters["lm_head.weight"]

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return float(self._schedules[0].get_last_lr()[0])

    @torch.no_grad()
    def _write_back(self) -> None:
        if self._sharded:
            return
        for name, parameter in self._parameters.items():
            parameter.copy_(self.masters[name])

    def tensors(self) -> dict[str, Tensor]:
        """The moments by name: `NAME.exp_avg` and `NAME.exp_avg_sq`, or Muon's `NAME.momentum_buffer`.

        Empty before the first step.
        """
        return {
            f"{name}.{key}": optimizer.state[master][key]
            for optimizer in self._optimizers
            for name, master in self.masters.items()
            if master in optimizer.state
            for key in _MOMENTS
            if key in optimizer.state[master]
        }

    def restore(self, tensors: dict[str, Tensor], *, step: int) -> None:
        """Continue after `step` updates with saved moments: whole tensors, the same on every rank."""
        names = {master: name for name, master in self.masters.items()}
        for optimizer in self._optimizers:
            keys = ("exp_avg", "exp_avg_sq") if optimizer is self.adam else ("momentum_buffer",)
            for master in (master for group in optimizer.param_groups for master in group["params"]):
                state = {key: torch.zeros_like(master) for key in keys}
                shared_out({key: tensors[f"{names[master]}.{key}"] for key in keys}, state)
                if optimizer is self.adam:
                    state["step"] = torch.tensor(float(step), device=master.device)  # the fused update wants it there
                optimizer.state[master] = state
        for schedule in self._schedules:
            _set_step(schedule, step)

    def _is_inner_matrix(self, name: str) -> bool:
        """Muon is for what maps hidden states to hidden states: not the head, whose rows are tokens."""
        return self.masters[name].ndim == 2 and name != "lm_head.weight"


def make_muon(matrices: list[nn.Parameter], config: Train) -> torch.optim.Optimizer:
    """Muon with updates of the size of AdamW's (0.2 in root mean square, arXiv:2502.16982): they share learning rates.

    Raises InputError where this torch has none.
    """
    if not hasattr(torch.optim, "Muon"):
        raise InputError(
            f"train.optimizer=muon needs torch 2.9 or newer, this is {torch.__version__}; use train.optimizer=adamw"
        )
    return torch.optim.Muon(
        matrices,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=0.95 if config.muon_momentum is None else config.muon_momentum,
        adjust_lr_fn="match_rms_adamw",
    )


def make_schedule(optimizer: torch.optim.Optimizer, config: Train) -> LambdaLR:
    """The config's schedule by transformers: a pure function of the step, whatever its name."""
    options: dict[str, Any] = {}
    if config.schedule == "cosine_with_min_lr":
        options["min_lr_rate"] = 0.1 if config.min_learning_rate_ratio is None else config.min_learning_rate_ratio
    elif config.schedule == "cosine_with_restarts":
        options["num_cycles"] = (config.restarts or 1) + 1
    elif config.schedule == "warmup_stable_decay":
        options["num_decay_steps"] = config.num_decay_steps
        options["decay_type"] = config.decay_shape or "1-sqrt"
        options["min_lr_ratio"] = config.min_learning_rate_ratio or 0.0
    schedule = get_scheduler(
        config.schedule,
        optimizer,
        num_warmup_steps=config.warmup_steps,
        num_training_steps=config.steps,
        scheduler_specific_kwargs=options or None,
    )
    assert isinstance(schedule, LambdaLR), f"{config.schedule} is no function of the step: it would not resume exactly"
    return schedule


def _set_step(schedule: LambdaLR, step: int) -> None:
    """Put the schedule at a step: nothing is replayed."""
    rates = [base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule.last_epoch = step
    schedule._last_lr = rates
