"""AdamW on fp32 masters, warm-up and cosine.

The draft computes in its own dtype; the optimizer sees fp32 copies. Without them a bfloat16 weight of 1.0 cannot take
an update below 0.004 and training stalls. The cost is 12 bytes a parameter (master and two moments). Gradients are
summed over accumulation in fp32, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from tasks.trainer.config import Train
from tasks.trainer.draft.eagle3 import Eagle3Draft


class Optimizer:
    """AdamW with masters for one draft.

    masters: fp32 copies of the draft's trainable parameters by name. `collect` moves the gradients of one backward
    into them, `step` clips, updates, and writes the masters back into the draft.
    """

    def __init__(self, draft: Eagle3Draft, masters: dict[str, Tensor], config: Train) -> None:
        self._parameters = dict(draft.named_parameters())
        self.masters = {
            name: nn.Parameter(masters[name].to(parameter.device, torch.float32).clone())
            for name, parameter in self._parameters.items()
        }
        decayed = [master for master in self.masters.values() if master.ndim > 1]
        others = [master for master in self.masters.values() if master.ndim <= 1]
        self.adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=config.adam_betas,
            fused=True,
        )
        self.schedule = get_scheduler(
            "cosine", self.adam, num_warmup_steps=config.warmup_steps, num_training_steps=config.steps
        )
        self._max_grad_norm = config.max_grad_norm
        self._write_back()

    def collect(self) -> None:
        """Add the draft's gradients to the masters' and free them."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            master = self.masters[name]
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad + gradient
            parameter.grad = None

    def step(self, *, check: Callable[[float], None] | None = None) -> float:
        """One update; returns the gradient's global norm before clipping.

        check: sees the norm before anything is updated, and may raise.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self._max_grad_norm))
        if check is not None:
            check(norm)
        self.adam.step()
        self.schedule.step()
        self.adam.zero_grad(set_to_none=True)
        self._write_back()
        return norm

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return float(self.schedule.get_last_lr()[0])

    @torch.no_grad()
    def _write_back(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self.masters[name])

    def tensors(self) -> dict[str, Tensor]:
        """The moments by name, as `NAME.exp_avg`, `NAME.exp_avg_sq`; empty before the first step."""
        tensors = {}
        for name, master in self.masters.items():
            for key in ("exp_avg", "exp_avg_sq"):
                if key in self.adam.state[master]:
                    tensors[f"{name}.{key}"] = self.adam.state[master][key]
        return tensors

    def restore(self, tensors: dict[str, Tensor], *, step: int) -> None:
        """Continue after `step` updates with saved moments."""
        for name, master in self.masters.items():
            self.adam.state[master] = {
                "step": torch.tensor(float(step), device=master.device),  # the fused update wants it there
                "exp_avg": tensors[f"{name}.exp_avg"].to(master.device),
                "exp_avg_sq": tensors[f"{name}.exp_avg_sq"].to(master.device),
            }
        # The schedule is a pure function of the step, so it is set there, not replayed.
        rates = [
            base * factor(step) for base, factor in zip(self.schedule.base_lrs, self.schedule.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.adam.param_groups, rates, strict=True):
            group["lr"] = rate
        self.schedule.last_epoch = step
        self.schedule._last_lr = rates
