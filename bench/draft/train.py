"""Train a draft on what the target wrote, on all GPUs of a host, in pieces that go on from one another."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from . import losses
from .anchors import Anchors, Sequences
from .config import Settings
from .export import weights_of
from .muon import Optimizer
from .network import Draft
from .rounding import round_q4_0, round_q8_0
from .target import Target, layer_in, layer_out

CLOCK, REPORT = 10, 500  # steps after which the time is looked at, and losses are shown
HELD = 1024  # sequences at the end of a rank's text that are not learned from
Q8 = ("proj", "selector")  # of recipe q4, what stays Q8_0: what turns hidden rows into kernels and the selector's gate


class Trainer:
    """One process of a run.

    Args:
        settings: of the run.
        out: folder of checkpoints.
        device: "cuda:0" or "cpu".
        rank, ranks: of this process; gradients are averaged over all.
    """

    def __init__(self, settings: Settings, out: Path, device: str, rank: int, ranks: int) -> None:
        self.settings, self.out, self.device, self.rank, self.ranks = settings, out, device, rank, ranks
        torch.manual_seed(settings.seed)
        self.target = Target(settings.target, device, torch.bfloat16)
        self.targets = {name: self.target.variant(name) for name in dict.fromkeys(settings.variants)}
        self.draft = Draft(settings.draft, self.target).to(device)
        self.optimizer = Optimizer(self.draft.named_parameters(), settings.train.peak_lr, settings.train.weight_decay)
        self.blocks = settings.train.blocks or [settings.draft.block]
        self.turn = self.target.rotary(settings.text.length + settings.draft.block)
        self.elapsed, self.steps, self.rounded = 0.0, 0, False
        fast = torch.compile if device.startswith("cuda") else lambda function, **_: function
        self.pre, self.post = fast(layer_in, dynamic=False), fast(layer_out, dynamic=False)
        self.forward = fast(self.draft, dynamic=False)
        self.one = fast(losses.unary_piece, dynamic=True)

    @torch.no_grad()
    def read(self, sequences: Sequences, rows: Tensor, variant: int) -> tuple[Tensor, Tensor]:
        """What the target makes of rows: features [R, T, m * width], and its logits [R * T, V]."""
        cos, sin = self.turn
        length, target = sequences.tokens.shape[1], self.targets[self.settings.variants[variant]]
        ids = sequences.tokens[rows].long()
        features, last = target.rows(ids, self.settings.draft.taps, self.pre, self.post, (cos[:length], sin[:length]))
        return features, F.linear(last.flatten(0, 1), target.head)

    def batch(
        self, sequences: Sequences, rows: Tensor, read: tuple[Tensor, Tensor], anchors: Tensor, block: int
    ) -> dict[str, Any]:
        """Lay out a pass of the draft: features, embeddings, positions, the teacher's logits, the tokens to learn."""
        length = sequences.tokens.shape[1]
        ids, (cos, sin) = sequences.tokens[rows].long(), self.turn
        at = anchors[..., None] + torch.arange(block, device=ids.device)  # [R, A, B]
        flat = at.flatten(1)
        tokens = ids.gather(1, flat).view_as(at)
        masked = torch.full_like(tokens, self.settings.draft.mask_token)
        masked[..., 0] = tokens[..., 0]
        offset = torch.arange(len(rows), device=ids.device)[:, None, None] * length
        return {
            "features": read[0],
            "embedded": self.target.embedding[masked],
            "seen": torch.arange(length, device=ids.device) < anchors[..., None],
            "turn": (cos[:length], sin[:length]),
            "block_turn": (cos[at][:, :, None], sin[at][:, :, None]),
            "teacher": read[1],
            "at": (at[..., :-1] + offset).flatten(0, 1),
            "block": tokens.flatten(0, 1),
            "valid": sequences.own[rows].gather(1, flat).view_as(at)[..., 1:].cumprod(-1).bool().flatten(0, 1),
            "repeated": sequences.repeated[rows].gather(1, flat).view_as(at)[..., 1].reshape(-1),
        }

    def losses(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The two losses, and what would have been accepted of each anchor's draft."""
        keys = ("features", "embedded", "seen", "turn", "block_turn")
        hidden = self.forward(*(batch[key] for key in keys)).flatten(0, 1)[:, 1:]
        tables = (self.draft.predecessor, self.draft.successor, self.draft.selector)
        train = self.settings.train
        importance = torch.where(batch["repeated"], train.repeated, 1.0)
        mix = (train.ce, train.decay, train.floor)
        return losses.losses(
            hidden, batch["teacher"], batch["at"], batch["block"], batch["valid"], importance, tables, self.target.head,
            self.settings.draft.top_k, mix, self.one,
        )  # fmt: skip

    def step(
        self, sequences: Sequences, chains: Anchors, rows: Tensor, variant: int, schedule: float, block: int
    ) -> Tensor:
        """One step with blocks of one length; the losses and the mean of accepted tokens, [3]."""
        anchors = chains.take(rows)
        batch = self.batch(sequences, rows, self.read(sequences, rows, variant), anchors, block)
        unary, selector, accepted = self.losses(batch)
        for p in self.draft.parameters():
            p.grad = None
        (unary + selector).backward()
        self.average()
        self.optimizer.step(schedule)
        self.optimizer.show(self.as_stored if self.rounded else lambda _, w: w)
        chains.walk(rows, anchors, accepted)
        return torch.stack((unary.detach(), selector.detach(), accepted.mean()))

    def as_stored(self, name: str, weight: Tensor) -> Tensor:
        """A weight as the file's type will hold it."""
        if weight.ndim != 2 or weight.shape[1] % 32:
            return weight
        return round_q8_0(weight) if name.rpartition(".")[2] in Q8 else round_q4_0(weight)

    def average(self) -> None:
        """Average gradients over the processes."""
        if self.ranks == 1:
            return
        grads = [p.grad for p in self.draft.parameters() if p.grad is not None]
        for dtype in {g.dtype for g in grads}:
            same = [g for g in grads if g.dtype == dtype]
            flat = torch.cat([g.reshape(-1) for g in same])
            dist.all_reduce(flat)
            flat /= self.ranks
            parts = flat.split([g.numel() for g in same])
            for g, part in zip(same, parts):
                g.copy_(part.view_as(g))

    def schedule(self) -> float:
        """Learning rate at this time of the run, of its peak: a short rise, flat, then linear to 0."""
        train = self.settings.train
        left = max(0.0, 1 - self.elapsed / train.seconds)
        return max(0.003, min(1.0, (self.steps + 1) / train.warmup, left / (1 - train.flat)))

    def warm(self) -> None:
        """Compile on made-up rows, and leave no trace of them."""
        state = {name: w.clone() for name, w in self.optimizer.master.items()}
        made = Sequences.__new__(Sequences)
        rows, length = self.settings.train.rows, self.settings.text.length
        made.tokens = torch.randint(0, self.target.vocabulary, (rows, length), device=self.device, dtype=torch.int32)
        made.own = torch.ones(rows, length, dtype=torch.bool, device=self.device)
        made.repeated = ~made.own
        made.variant = torch.zeros(rows, dtype=torch.uint8, device=self.device)
        chains = Anchors(made, self.settings.train.anchors, self.settings.draft.block)
        for block in (*dict.fromkeys(self.blocks),) * 3:
            self.step(made, chains, torch.arange(rows, device=self.device), 0, 0.0, block)
        self.optimizer.put(state)
        self.optimizer.adam.state.clear()
        for m in self.optimizer.momentum.values():
            m.zero_()
        self.optimizer.show(lambda _, w: w)

    def order(self, sequences: Sequences) -> Iterator[tuple[Tensor, int]]:
        """Rows and their variant for one step after another; endless."""
        size, learned = self.settings.train.rows, len(sequences) - HELD if len(sequences) > 2 * HELD else len(sequences)
        for epoch in itertools.count():
            made = torch.Generator().manual_seed(self.settings.seed + 1000 * epoch + self.rank + self.steps)
            batches: list[tuple[Tensor, int]] = []
            for index in range(len(self.settings.variants)):
                mine = (sequences.variant[:learned] == index).nonzero()[:, 0]
                mine = mine[torch.randperm(len(mine), generator=made).to(mine.device)]
                batches += [(rows, index) for rows in mine.split(size)[: len(mine) // size]]
            for place in torch.randperm(len(batches), generator=made).tolist():
                yield batches[place]

    def run(self, sequences: Sequences, until: float) -> None:
        """Go on until the run is over or time.time() is `until`; a checkpoint at the end and now and then."""
        train, chains = self.settings.train, Anchors(sequences, self.settings.train.anchors, self.settings.draft.block)
        mean, start, before = None, self.agreed(time.time()), self.elapsed
        saved = start
        for rows, variant in self.order(sequences):
            if self.steps % CLOCK == 0:
                now = self.agreed(time.time())
                self.elapsed = before + now - start
                if self.elapsed >= train.seconds or now >= until:
                    break
                self.rounded = train.quantised == "q4" and self.elapsed >= train.quantise_from * train.seconds
            block = self.blocks[self.steps % len(self.blocks)]
            found = self.step(sequences, chains, rows, variant, self.schedule(), block)
            self.steps += 1
            mean = found if mean is None else mean.lerp(found, 0.01)
            if self.steps % REPORT == 0:
                self.report(mean)
            if self.steps % CLOCK == 0 and now - saved > train.checkpoint_every:
                saved = now
                self.save()
        if mean is not None:
            self.report(mean)
        self.save()

    def report(self, mean: Tensor) -> None:
        """Show the means of the last steps: losses, and tokens a round as the chains of anchors walk."""
        unary, selector, accepted = mean.tolist()
        at = f"step {self.steps}, {self.elapsed:.0f} s, rate {self.schedule():.3f}"
        self.say(f"{at}: logits {unary:.3f}, selector {selector:.3f}, mean_len {1 + accepted:.3f}")

    def agreed(self, now: float) -> float:
        """The first process's clock, so that all stop at the same step."""
        if self.ranks == 1:
            return now
        clock = torch.tensor([now], dtype=torch.float64, device=self.device)
        dist.broadcast(clock, 0)
        return float(clock)

    def save(self) -> None:
        """Write a checkpoint: all that is needed to go on or to export."""
        if self.rank == 0:
            kept = {**self.optimizer.state(), "elapsed": self.elapsed, "steps": self.steps}
            torch.save(kept, self.out / "checkpoint.tmp")
            (self.out / "checkpoint.tmp").replace(self.out / "checkpoint.pt")

    def load(self, path: Path, weights_only: bool = False) -> None:
        """Go on from a checkpoint; or begin anew from the weights alone of one, or of a draft's GGUF."""
        if weights_only and path.suffix == ".gguf":
            self.optimizer.put(weights_of(path))
        else:
            state = torch.load(path, map_location=self.device, weights_only=True)
            if weights_only:
                self.optimizer.put(state["master"])
            else:
                self.optimizer.restore(state)
                self.elapsed, self.steps = state["elapsed"], state["steps"]
        self.optimizer.show(lambda _, w: w)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)
