"""FSDP2 for the draft: every rank keeps its share of the fp32 masters, moments and gradients.

The whole draft is one group: its layer runs as pieces, K times a pass, and not through the forwards of its modules, so
there is nothing to gather twice. The weights are gathered in the compute dtype at the start of an optimizer step, stay
through its passes, and gradients are reduced in float32 after the last one. What is saved is 12 bytes a parameter
divided by the ranks; what is not is the gathered copy (2 bytes in bfloat16) and, while passes add up, float32
gradients. The head's gradient passes through the compute dtype, which `ddp` avoids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tasks.trainer.draft.ttt import Unrolled
from tasks.trainer.train.parallel import Layout


def shard(draft: nn.Module, layout: Layout, dtype: torch.dtype) -> None:
    """Divide a float32 draft's parameters, on their device, over all ranks. dtype: what it computes in.

    Gradients are sums over the ranks: the loss is divided by the rows of all of them already (N_k).
    """
    mesh = init_device_mesh(layout.device, (layout.world_size,))
    # No cast of what a forward is given: states stay as they were stored.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(draft, mesh=mesh, mp_policy=policy)
    assert isinstance(draft, FSDPModule)
    draft.set_gradient_divide_factor(1.0)
    draft.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sums


def is_sharded(draft: nn.Module) -> bool:
    """Whether `shard` was here."""
    return isinstance(draft, FSDPModule)


@contextmanager
def whole(draft: nn.Module) -> Iterator[None]:
    """Inside, every rank has the whole draft in its compute dtype, to look at and not to train. All ranks must come."""
    if not isinstance(draft, FSDPModule):
        yield
        return
    draft.unshard()
    try:
        yield
    finally:
        draft.reshard()


def begin_step(draft: nn.Module) -> None:
    """Before the passes of one optimizer step, on every rank, even on one whose passes come later: gather the draft."""
    if isinstance(draft, FSDPModule):
        draft.unshard()


def run_pass(draft: nn.Module, body: Callable[[nn.Module], Unrolled], *, last: bool) -> Unrolled:
    """A forward and backward on this rank: the loss of body(draft).

    last: of this rank's passes in the step. Its gradients then are summed over the ranks, so all ranks must be there.
    """
    if not isinstance(draft, FSDPModule):
        unrolled = body(draft)
        unrolled.loss.backward()
        return unrolled

    def reaching_all(of: nn.Module) -> tuple[Tensor, Unrolled]:
        unrolled = body(of)
        if unrolled.rows.any():
            return unrolled.loss, unrolled
        # Nothing of this pack counts, and what has no gradient would be left out of what the ranks reduce.
        nothing = torch.stack([parameter.sum() for parameter in of.parameters()]).sum() * 0.0
        return unrolled.loss + nothing, unrolled

    draft.set_requires_gradient_sync(last)
    draft.set_is_last_backward(last)
    draft.set_reshard_after_backward(last)
    loss, unrolled = draft(reaching_all)  # FSDP2's hooks are on the call and on the loss
    loss.backward()
    return cast("Unrolled", unrolled)


def whole_tensor(value: Tensor) -> Tensor:
    """A tensor that may be shared out, whole. All ranks must come where it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def shared_out(tensors: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> None:
    """Copy whole tensors, the same on every rank, into places, or each rank's share into its own."""
    with torch.no_grad():
        for name, place in places.items():
            source: Any = tensors[name].to(place.device)
            if isinstance(place, DTensor):
                source = distribute_tensor(source, place.device_mesh, place.placements, src_data_rank=None)
            place.copy_(source)
