"""Where blocks are drafted from: each sequence has chains of anchors that walk as rounds do.

A chain's next anchor is the token after those that the draft would have had accepted, as in a real round, so the draft
learns from the places that it will be asked at: more often hard ones. A chain that leaves its reply starts anew.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

KEYS = ("tokens", "own", "repeated", "kind", "variant")


class Sequences:
    """What the target wrote.

    Attributes:
        tokens: int32 [S, T].
        own: bool [S, T], the target's own choice: no prompt, and no sampled token that it would not have picked.
        repeated: bool [S, T], within a stretch that repeats itself.
        kind: uint8 [S], index of the prompt's kind.
        variant: uint8 [S], index of the target's variant that wrote it.
    """

    tokens: Tensor
    own: Tensor
    repeated: Tensor
    kind: Tensor
    variant: Tensor

    def __init__(self, path: Path, device: str) -> None:
        found = torch.load(path, weights_only=True)
        for key in KEYS:
            setattr(self, key, found[key].to(device))

    def __len__(self) -> int:
        return len(self.tokens)


class Anchors:
    """Chains of anchors: `at` is int16 [S, A].

    Args:
        sequences: of which chains walk.
        chains: A, of each sequence.
        block: B, tokens of a block, anchor included.
    """

    def __init__(self, sequences: Sequences, chains: int, block: int) -> None:
        self.sequences, self.block = sequences, block
        self.at = torch.full((len(sequences), chains), -1, dtype=torch.int16, device=sequences.tokens.device)

    def possible(self, rows: Tensor) -> Tensor:
        """Bool [R, T]: places for an anchor, where its token and the next are the target's own."""
        own = self.sequences.own[rows]
        place = own & F.pad(own[:, 1:], (0, 1))
        place[:, -(self.block - 1) :] = False
        return place

    def take(self, rows: Tensor) -> Tensor:
        """Anchors int64 [R, A]; chains that have not begun or are over begin at a random place."""
        place = self.possible(rows)
        weight = place.float() * torch.where(self.sequences.repeated[rows], 0.1, 1.0)
        weight[:, : -(self.block - 1)] += 1e-9  # a row without a place gives blocks that count for nothing
        fresh = torch.multinomial(weight, self.at.shape[1], replacement=True)
        kept = self.at[rows].long()
        good = (kept >= 0) & place.gather(1, kept.clamp_min(0))
        return torch.where(good, kept, fresh)

    def walk(self, rows: Tensor, anchors: Tensor, accepted: Tensor) -> None:
        """Move each chain past what was accepted."""
        after = anchors + 1 + accepted.view_as(anchors).long()
        last = self.sequences.tokens.shape[1] - 1
        self.at[rows] = torch.where(after > last, -1, after).to(torch.int16)


def repeats(tokens: Tensor, run: int = 24, furthest: int = 64) -> Tensor:
    """Find repeated stretches, bool [S, T]: at least `run` tokens equal to those at one distance before them."""
    found = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
    for lag in range(1, min(furthest, tokens.shape[1] - run) + 1):
        same = F.pad((tokens[:, lag:] == tokens[:, :-lag]).float(), (lag, 0))
        full = (F.avg_pool1d(same[:, None], run, 1)[:, 0] > 1 - 0.5 / run).float()
        found |= F.max_pool1d(F.pad(full, (run - 1, run - 1))[:, None], run, 1)[:, 0] > 0
    return found
