# mypy: allow-untyped-defs, allow-incomplete-defs
"""`targets.store_targets` in Triton: one small launch, fit for capture."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=("count",))
def _targets(
    plan_ptr, out_loc_ptr, slots_ptr, positions_ptr, count,
    ratio: tl.constexpr, decode: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    mask = at < count
    length = tl.load(plan_ptr + 4 * at, mask=mask, other=-1)
    valid = length >= ratio
    if decode:
        token = at
        valid &= length % ratio == 0
    else:
        token = tl.load(plan_ptr + 4 * at + 1, mask=mask, other=0) & 0xFFFF
    tl.store(slots_ptr + at, tl.load(out_loc_ptr + token, mask=valid, other=-1), mask=mask)
    tl.store(positions_ptr + at, tl.where(valid, length - ratio, 0), mask=mask)


def store_targets_triton(
    plan: torch.Tensor, out_loc: torch.Tensor, ratio: int, *, decode: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `targets.store_targets_reference`."""
    count, block = plan.shape[0], 128
    slots = torch.empty(count, dtype=torch.int64, device=plan.device)
    positions = torch.empty(count, dtype=torch.int32, device=plan.device)
    if count:
        _targets[(triton.cdiv(count, block),)](
            plan.view(torch.int32), out_loc, slots, positions, count, ratio=ratio, decode=decode, block=block
        )
    return slots, positions
