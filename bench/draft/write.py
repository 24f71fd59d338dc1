"""Let the target write the text to learn from: greedy replies to prompts of many kinds, thousands side by side."""

from __future__ import annotations

import multiprocessing as mp
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .anchors import repeats
from .config import Settings
from .losses import top
from .prompts import Feeder, Turns
from .target import Target, layer_in, layer_out

SPAN = 64  # keys by which the attended part of the cache grows
FEEDERS = 3


class Decoder:
    """The next token of many rows, all at one position; captured once for each span of keys on a GPU."""

    def __init__(self, target: Target, rows: int, length: int, top: int) -> None:
        self.target, self.top = target, top
        weight = target.embedding
        self.device, self.cuda = weight.device, weight.is_cuda
        shape = (target.layers, rows, target.kv_heads, length, target.head_dim)
        self.keys, self.values = (torch.zeros(shape, device=self.device, dtype=weight.dtype) for _ in range(2))
        self.ids = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.at = torch.zeros(1, dtype=torch.long, device=self.device)
        self.cos, self.sin = target.rotary(length)
        fast = torch.compile if self.cuda else lambda function, **_: function
        self.pre, self.post = fast(layer_in, dynamic=False), fast(layer_out, dynamic=False)
        self.graphs: dict[int, Any] = {}

    def next(self, position: int) -> tuple[Tensor, Tensor]:
        """The largest logits float32 [R, top] after `ids` at a position, and their tokens."""
        self.at.fill_(position)
        span = min(self.keys.shape[3], (position // SPAN + 1) * SPAN)
        if not self.cuda:
            return self._pass(span)
        if span not in self.graphs:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._pass(span)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = self._pass(span)
            self.graphs[span] = (graph, out)
        graph, out = self.graphs[span]
        graph.replay()
        return out  # type: ignore[no-any-return]

    def _pass(self, span: int) -> tuple[Tensor, Tensor]:
        t = self.target
        x = t.embedding[self.ids][:, None]
        turn = self.cos[self.at], self.sin[self.at]
        seen = torch.zeros(span, device=self.device, dtype=x.dtype)
        seen = seen.masked_fill(torch.arange(span, device=self.device) > self.at, float("-inf")).view(1, 1, 1, span)
        for index, block in enumerate(t.blocks):
            q, k, v = self.pre(t, x, block, *turn)
            keys, values = self.keys[index], self.values[index]
            keys.index_copy_(2, self.at, k)
            values.index_copy_(2, self.at, v)
            grouped = q.reshape(len(q), t.kv_heads, -1, t.head_dim)
            o = F.scaled_dot_product_attention(grouped, keys[:, :, :span], values[:, :, :span], attn_mask=seen)
            x = self.post(t, x, o.reshape(len(q), 1, -1), block)
        hidden = F.rms_norm(x[:, 0], (t.width,), t.norm, t.eps)
        logits = torch.mm(hidden, t.head.mT, out_dtype=torch.float32) if self.cuda else F.linear(hidden, t.head).float()
        return top(logits, self.top)


class Writer:
    """Writes rounds of sequences.

    A row is given its prompt's tokens, or the start of a user's turn that the target goes on with; it ends turns
    itself, and after a reply a new user's turn begins, until the row is full.
    """

    def __init__(self, settings: Settings, turns: Turns, device: str) -> None:
        self.settings, self.turns, self.device = settings, turns, device
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        read = Target(settings.target, device, dtype)
        self.variants = {name: read.variant(name) for name in dict.fromkeys(settings.variants)}
        self.target = read
        text = settings.text
        self.decoder = Decoder(self.target, text.rows, text.length, text.top)
        self.reply = torch.tensor(turns.reply + [0] * (16 - len(turns.reply)), device=device)
        self.user = torch.tensor(turns.user + [0] * (16 - len(turns.user)), device=device)

    @torch.no_grad()
    def round(self, given: Tensor, kind: Tensor, replying: Tensor, variant: int) -> dict[str, Tensor]:
        """One round.

        Args:
            given: int64 [R, T], a prompt's tokens, then -1.
            kind: uint8 [R].
            replying: bool [R], whether the reply begins after what is given; else the target goes on as the user.
            variant: index of the target's variant that writes.
        """
        text, rows, device = self.settings.text, len(given), self.device
        self.target.take(self.variants[self.settings.variants[variant]])
        first = torch.where(
            torch.rand(rows, device=device) < text.sampled_starts, torch.randint(1, 17, (rows,), device=device), 0
        )
        stray = torch.where(torch.rand(rows, device=device) < text.sampled_rows, text.sampled_tokens, 0.0)
        tokens = torch.zeros(rows, text.length, dtype=torch.long, device=device)
        own = torch.zeros(rows, text.length, dtype=torch.bool, device=device)
        waiting = torch.zeros(rows, 16, dtype=torch.long, device=device)  # tokens between turns that are to come
        n_waiting, n_reply, n_user = (torch.zeros(rows, dtype=torch.long, device=device) for _ in range(3))
        tokens[:, 0] = given[:, 0]
        for i in range(text.length - 1):
            self.decoder.ids.copy_(tokens[:, i])
            values, candidates = self.decoder.next(i)
            greedy, chance = candidates[:, 0], (values - values[:, :1]).exp()
            drawn = (chance / torch.empty_like(chance).exponential_()).argmax(-1, keepdim=True)
            drawn = candidates.gather(1, drawn)[:, 0]
            is_given, queued = given[:, i + 1] >= 0, n_waiting > 0
            free = ~is_given & ~queued
            sample = ~replying | (n_reply < first) | (torch.rand(rows, device=device) < stray)
            pick = torch.where(sample, drawn, greedy)
            pick = torch.where(~replying & (n_user >= text.user_tokens), self.turns.end, pick)
            pick = torch.where(queued, waiting[:, 0], pick)
            pick = torch.where(is_given, given[:, i + 1], pick)
            own[:, i + 1] = replying & free & (pick == greedy)
            n_reply += (replying & free).long()
            n_user += (~replying & free).long()
            shift = queued & ~is_given
            waiting = torch.where(shift[:, None], waiting.roll(-1, 1), waiting)
            n_waiting -= shift.long()
            ended = free & (pick == self.turns.end)
            to_reply, to_user = ended & ~replying, ended & replying
            waiting = torch.where(to_reply[:, None], self.reply, torch.where(to_user[:, None], self.user, waiting))
            n_waiting = torch.where(
                to_reply, len(self.turns.reply), torch.where(to_user, len(self.turns.user), n_waiting)
            )
            n_reply, n_user = n_reply.masked_fill(to_user, 0), n_user.masked_fill(to_user, 0)
            replying = (replying | to_reply) & ~to_user
            tokens[:, i + 1] = pick
        full = torch.full_like(kind, variant)
        made = {"tokens": tokens.int(), "own": own, "repeated": repeats(tokens), "kind": kind, "variant": full}
        return {name: tensor.cpu() for name, tensor in made.items()}


def write(settings: Settings, out: Path, device: str, rank: int) -> None:
    """Write rounds for the settings' seconds into text-RANK.pt in `out`; the last round is the held-out one."""
    start, context = time.time(), mp.get_context("spawn")
    queues = [context.Queue(1) for _ in range(FEEDERS)]
    feeders = [
        context.Process(target=Feeder.serve, args=(settings, settings.seed + 100 * rank + index, queue), daemon=True)
        for index, queue in enumerate(queues)
    ]
    for feeder in feeders:
        feeder.start()
    torch.manual_seed(settings.seed + rank)
    turns = Turns.of(settings.target)
    writer, rounds, took = Writer(settings, turns, device), [], 0.0
    while len(rounds) < 2 or time.time() - start + took < settings.text.seconds:
        began = time.time()
        given = [torch.from_numpy(array).to(device) for array in queues[len(rounds) % FEEDERS].get()]
        rounds.append(writer.round(*given, variant=len(rounds) % len(settings.variants)))
        took = time.time() - began
        last = rounds[-1]
        if rank == 0 and len(rounds) in (1, 2, 3, 10, 20, 30, 40, 50):
            again = (last["repeated"] & last["own"]).sum() / last["own"].sum()
            print(
                f"round {len(rounds)} {took:.1f} s, own {last['own'].float().mean():.2f}, repeated {again:.2f}",
                flush=True,
            )
        if rank == 0 and len(rounds) == 1:
            turns.show(last)
    for feeder in feeders:
        feeder.terminate()
    found = {name: torch.cat([part[name] for part in rounds]) for name in rounds[0]}
    torch.save(found, out / f"text-{rank}.tmp")
    (out / f"text-{rank}.tmp").replace(out / f"text-{rank}.pt")
    counts = torch.bincount(found["tokens"][found["own"]], minlength=writer.target.vocabulary)
    np.save(out / f"counts-{rank}.npy", counts.numpy())
    print(
        f"rank {rank}: {len(rounds)} rounds, {found['own'].sum() / 1e6:.1f} M own tokens, {time.time() - start:.0f} s",
        flush=True,
    )
