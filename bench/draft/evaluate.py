"""mean_len on sequences that were not learned from, by rounds that begin where the last one ended."""

from __future__ import annotations

import torch

from .anchors import Anchors, Sequences
from .train import HELD, Trainer

ROWS = 128


@torch.no_grad()
def evaluate(trainer: Trainer, sequences: Sequences) -> float:
    """Print mean_len by kind, and return it over all rounds; a sampled token ends a row's rounds."""
    settings = trainer.settings
    kinds = list(settings.text.kinds)
    rounds, accepted = torch.zeros(len(kinds)), torch.zeros(len(kinds))
    held = torch.arange(max(0, len(sequences) - HELD), len(sequences), device=trainer.device)
    trainer.forward = trainer.draft  # shapes of its own: not worth compiling
    for rows in held.split(ROWS):
        chains = Anchors(sequences, 1, settings.draft.block)
        place = chains.possible(rows)
        at = place.float().argmax(1, keepdim=True)
        going = place.any(1)
        kind = sequences.kind[rows].long().cpu()
        read = trainer.read(sequences, rows, int(sequences.variant[rows[0]]))
        while going.any():
            found = trainer.losses(trainer.batch(sequences, rows, read, at, settings.draft.block))[2]
            rounds.index_add_(0, kind, going.float().cpu())
            accepted.index_add_(0, kind, (found * going).cpu())
            at = at + 1 + found.long()[:, None]
            going &= (at[:, 0] < place.shape[1]) & place.gather(1, at.clamp_max(place.shape[1] - 1))[:, 0]
            at = at.clamp_max(place.shape[1] - settings.draft.block)
    each = {name: round(1 + float(a / n), 2) for name, n, a in zip(kinds, rounds, accepted) if n}
    mean = 1 + float(accepted.sum() / rounds.sum())
    trainer.say(f"held out: mean_len {mean:.3f} over {int(rounds.sum())} rounds {each}")
    return mean
