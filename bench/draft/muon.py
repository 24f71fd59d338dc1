"""Muon for matrices and AdamW for the rest, on float32 weights beside the ones that a pass uses.

Muon: K. Jordan and others, 2024; the update is scaled to AdamW's root mean square as in Moonlight (2025).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Callable

import torch
from torch import Tensor, nn

MOMENTUM, STEPS = 0.95, 5
TERMS = (3.4445, -4.7750, 2.0315)  # of the quintic that brings singular values near 1


def orthogonal(matrices: Tensor) -> Tensor:
    """[n, a, b] with a <= b -> the same, singular values near 1."""
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        square = x @ x.mT
        x = TERMS[0] * x + (TERMS[1] * square + TERMS[2] * square @ square) @ x
    return x


class Optimizer:
    """Steps the weights of a module.

    Args:
        named: parameters; those of `is_matrix` go to Muon.
        rate, weight_decay: the peak of the learning rate of both, and Muon's decay.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], rate: float, weight_decay: float) -> None:
        self.rate, self.weight_decay = rate, weight_decay
        self.used = dict(named)
        self.master = {name: p.detach().float().clone() for name, p in self.used.items()}
        self.shapes: dict[tuple[int, int], list[str]] = {}
        for name, p in self.used.items():
            if is_matrix(name, p):
                self.shapes.setdefault((min(p.shape), max(p.shape)), []).append(name)
        self.rest = [name for name, w in self.master.items() if not is_matrix(name, w)]
        rest = [self.master[name] for name in self.rest]
        self.adam = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=rest[0].is_cuda)
        device = rest[0].device
        self.momentum = {shape: torch.zeros(len(names), *shape, device=device) for shape, names in self.shapes.items()}

    @torch.no_grad()
    def step(self, schedule: float) -> None:
        """One step from the gradients of the weights in use, at `schedule` times the peak rate."""
        for name in self.rest:
            self.master[name].grad = self.used[name].grad.float()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_([self.master[name] for name in self.rest], 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.rate * schedule
        self.adam.step()
        for shape, names in self.shapes.items():
            upright = [self.used[name].shape[0] > self.used[name].shape[1] for name in names]
            grads = [self.used[name].grad for name in names]
            stacked = torch.stack([g.mT if up else g for g, up in zip(grads, upright)]).float()  # type: ignore[union-attr]
            momentum = self.momentum[shape].lerp_(stacked, 1 - MOMENTUM)
            update = orthogonal(stacked.lerp(momentum, MOMENTUM)).float() * (0.2 * math.sqrt(shape[1]))
            updates = [u.mT if up else u for u, up in zip(update.unbind(), upright)]
            masters = [self.master[name] for name in names]
            torch._foreach_mul_(masters, 1 - self.rate * schedule * self.weight_decay)
            torch._foreach_add_(masters, updates, alpha=-self.rate * schedule)

    @torch.no_grad()
    def show(self, rounded: Callable[[str, Tensor], Tensor]) -> None:
        """Copy the float32 weights into those in use, each through `rounded(name, weight)`."""
        for name, w in self.master.items():
            self.used[name].copy_(rounded(name, w))

    def state(self) -> dict[str, Any]:
        """All that a later run needs to go on."""
        momentum = {str(shape): m for shape, m in self.momentum.items()}
        return {"master": self.master, "adam": self.adam.state_dict(), "momentum": momentum}

    @torch.no_grad()
    def put(self, weights: dict[str, Tensor]) -> None:
        """Copy weights into the float32 ones."""
        for name, w in self.master.items():
            w.copy_(weights[name])

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what state() returned."""
        self.put(state["master"])
        self.adam.load_state_dict(state["adam"])
        for shape, m in self.momentum.items():
            m.copy_(state["momentum"][str(shape)])


def is_matrix(name: str, weight: Tensor) -> bool:
    """Whether Muon steps it: a matrix that is no table of tokens."""
    return weight.ndim == 2 and name not in ("predecessor", "successor")
