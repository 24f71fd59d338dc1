"""What a draft is trained for: the target's choice by its own logits, and by the selector among its candidates.

N rows are drafted positions, V the vocabulary, P the positions of the batch's sequences.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

CHUNK = 64  # columns that a maximum is first taken over
PIECE = 4096  # rows whose logits are float32 at a time


class Unary(torch.autograd.Function):
    """Sum of weight * (ce * CE(token) + (1 - ce) * KL(target || draft)) over rows; forward makes the gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, teacher: Tensor, at: Tensor, token: Tensor, weight: Tensor, ce: float, one: Any
    ) -> Tensor:
        """Logits [N, V]; teacher [P, V], of which row n's is teacher[at[n]]; token, weight [N]."""
        gradient, total = torch.empty_like(logits), torch.zeros((), device=logits.device)
        for start in range(0, len(logits), PIECE):
            part = slice(start, start + PIECE)
            loss, gradient[part] = one(logits[part], teacher, at[part], token[part], weight[part], ce)
            total = total + loss
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(outer[0].to(gradient.dtype)), None, None, None, None, None, None


def unary_piece(
    logits: Tensor, teacher: Tensor, at: Tensor, token: Tensor, weight: Tensor, ce: float
) -> tuple[Tensor, Tensor]:
    """The loss of some rows, and its gradient in the logits' dtype."""
    log_q = logits.float().log_softmax(-1)
    log_p = teacher[at].float().log_softmax(-1)
    p = log_p.exp()
    loss = -ce * log_q.gather(1, token[:, None])[:, 0] + (1 - ce) * (p * (log_p - log_q)).sum(-1)
    is_token = torch.arange(logits.shape[1], device=logits.device) == token[:, None]
    gradient = weight[:, None] * (log_q.exp() - ce * is_token.float() - (1 - ce) * p)
    return (weight * loss).sum(), gradient.to(logits.dtype)


def top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their columns, exact: they lie in the k chunks with the largest maxima."""
    if logits.shape[-1] % CHUNK:
        logits = F.pad(logits, (0, -logits.shape[-1] % CHUNK), value=float("-inf"))
    chunks = logits.unflatten(-1, (-1, CHUNK))
    best = chunks.amax(-1).topk(k, -1).indices
    values, place = chunks.gather(1, best[..., None].expand(-1, -1, CHUNK)).flatten(1).topk(k, -1)
    return values, best.gather(1, place // CHUNK) * CHUNK + place % CHUNK


class Selected(NamedTuple):
    """Candidates [N, k] that hold the right token, their scores after its predecessor, whether it would be picked."""

    candidates: Tensor
    scores: Tensor
    right: Tensor


def select(
    hidden: Tensor,
    logits: Tensor,
    token: Tensor,
    before: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    head: Tensor,
    k: int,
) -> Selected:
    """Score candidates by the logits and the pair of tokens: u + predecessor * gate(hidden) * successor.

    Args:
        hidden: [N, width].
        logits: [N, V], only read for the candidates.
        token: [N], the right one.
        before: [N], the one before it.
        tables: predecessor and successor [V, rank], gate [rank, width].
        head: [V, width] of the target.
        k: candidates a row.
    """
    predecessor, successor, gate = tables
    with torch.no_grad():
        candidates = top(logits, k)[1]
        missing = ~(candidates == token[:, None]).any(-1)
        candidates[:, -1] = torch.where(missing, token, candidates[:, -1])
    unary = torch.bmm(head[candidates], hidden[..., None])[..., 0].float()
    pair = F.embedding(before, predecessor) * F.linear(hidden, gate)
    scores = unary + torch.bmm(F.embedding(candidates, successor), pair[..., None])[..., 0].float()
    with torch.no_grad():
        picked = candidates.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
        right = (picked == token) & ~missing
    return Selected(candidates, scores, right)


def slot_weights(valid: Tensor, right: Tensor, decay: float, floor: float, importance: Tensor) -> Tensor:
    """Weights [A, S] of an anchor's slots, 1 in sum.

    Args:
        valid: bool [A, S]: the slot's token, and all before it, are the target's own choice.
        right: bool [A, S]: the draft would have picked it.
        decay: slot i weighs exp(-i / decay).
        floor: times this after a slot where the draft was wrong.
        importance: [A].
    """
    slots = valid.shape[1]
    fall = torch.exp(-torch.arange(slots, device=valid.device) / decay)
    reached = F.pad(right[:, :-1].float().cumprod(1), (1, 0), value=1.0)
    weight = valid.float() * fall * (floor + (1 - floor) * reached) * importance[:, None]
    return weight / weight.sum().clamp_min(1e-6)


def losses(
    hidden: Tensor,
    teacher: Tensor,
    at: Tensor,
    block: Tensor,
    valid: Tensor,
    importance: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    head: Tensor,
    k: int,
    mix: tuple[float, float, float],
    one: Callable[..., Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """The unary and the selector's loss, and how many tokens each anchor's draft would have had accepted, [A].

    Args:
        hidden: [A, B - 1, width] of the masks.
        teacher: [P, V] logits of the target.
        at: [A, B - 1], the row of `teacher` that chooses each slot's token.
        block: [A, B], anchors and the tokens after them.
        valid: see slot_weights.
        importance: [A].
        tables: see select.
        head: see select.
        k: see select.
        mix: ce, decay, floor of the settings.
        one: unary_piece, or compiled.
    """
    anchors, slots = valid.shape
    flat = hidden.reshape(anchors * slots, -1)
    logits = F.linear(flat, head)
    token, before = block[:, 1:].reshape(-1), block[:, :-1].reshape(-1)
    picked = select(flat, logits.detach(), token, before, tables, head, k)
    right = picked.right.view(anchors, slots)
    weight = slot_weights(valid, right, mix[1], mix[2], importance).reshape(-1)
    unary = Unary.apply(logits, teacher, at.reshape(-1), token, weight, mix[0], one)
    wanted = (picked.candidates == token[:, None]).float().argmax(-1)
    selector = (F.cross_entropy(picked.scores, wanted, reduction="none") * weight).sum()
    return unary, selector, (right & valid).float().cumprod(1).sum(1)
