"""Rotary position embedding on the last `rope_dim` dims (half-split pairs)."""

from __future__ import annotations

import torch

from dsv4ctl.engine_adapters.reference.geometry import Geometry

THETA = 10000.0


class Rope:
    """Tables of cosines and sines: fp32 [context_tokens, rope_dim / 2]."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        half = geometry.rope_dim // 2
        frequencies = THETA ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
        angles = torch.arange(geometry.context_tokens, dtype=torch.float64, device=device)[:, None] * frequencies
        self._half = half
        self._cos, self._sin = angles.cos().to(torch.float32), angles.sin().to(torch.float32)

    def at(self, x: torch.Tensor, start: int, inverse: bool = False) -> torch.Tensor:
        """Rotate x [T, heads, dim] in place for positions start..start+T-1 (back, if `inverse`); returns x."""
        end = start + x.shape[0]
        return self._rotate(x, self._cos[start:end, None], self._sin[start:end, None], inverse)

    def at_blocks(self, x: torch.Tensor, block: int, ratio: int) -> torch.Tensor:
        """Rotate x [n, dim] in place: blocks block..block+n-1, each at its first token's position; returns x."""
        rows = slice(block * ratio, (block + x.shape[0]) * ratio, ratio)
        return self._rotate(x, self._cos[rows], self._sin[rows], inverse=False)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> torch.Tensor:
        first, second = x[..., -2 * self._half : -self._half], x[..., -self._half :]
        turned = first * sin
        if inverse:
            first.mul_(cos).addcmul_(second, sin)
            second.mul_(cos).sub_(turned)
        else:
            first.mul_(cos).addcmul_(second, sin, value=-1)
            second.mul_(cos).add_(turned)
        return x
