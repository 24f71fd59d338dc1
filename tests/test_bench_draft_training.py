"""How a draft is trained: rounding, chains of anchors, losses, the optimizer, the network, a run in pieces."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import gguf
import pytest
from benching import ROOT
from tiny import MASK, SAID, Files

pytest.importorskip("torch")
pytest.importorskip("tomllib")

import torch
from torch import Tensor

from bench.draft import anchors, config, export, losses, muon, rounding, train
from pyllama_dflash import recipes

pytestmark = pytest.mark.filterwarnings("ignore:CUDA initialization")  # of a driver that is older than torch

SETTINGS = ROOT / "bench/draft/smollm2-135m.toml"
TINY = [
    *("draft.layers=2", "draft.ff=64", "draft.block=4", "draft.taps=[0, 1]", "draft.rank=8", "draft.top_k=4"),
    *("draft.vocabulary=0", f"draft.mask_token={MASK}", 'target.variants=[""]', "text.length=24"),
    *("train.rows=4", "train.anchors=2", "train.warmup=5", "train.seconds=40", "train.quantise_from=2.0"),
]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sequences(n: int, length: int, vocabulary: int = 400) -> anchors.Sequences:
    made = anchors.Sequences.__new__(anchors.Sequences)
    made.tokens = torch.randint(0, vocabulary, (n, length), generator=rng(), dtype=torch.int32)
    made.own = torch.ones(n, length, dtype=torch.bool)
    made.repeated = ~made.own
    made.kind = made.variant = torch.zeros(n, dtype=torch.uint8)
    return made


# rounding ---------------------------------------------------------------------------------------------------------


def stored(weight: Tensor, kind: str) -> Tensor:
    to = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), to), to))


def weights() -> Tensor:
    made = torch.randn(64, 96, generator=rng()) * torch.logspace(-3, 1, 64)[:, None]
    made[5] = 0
    return made


def test_q4_0_is_rounded_as_in_a_file() -> None:
    assert torch.equal(rounding.round_q4_0(weights()), stored(weights(), "Q4_0"))


def test_q8_0_is_rounded_as_in_a_file_up_to_half_ways() -> None:
    ours, theirs = rounding.round_q8_0(weights()), stored(weights(), "Q8_0")
    step = (weights().unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127).expand(-1, -1, 32).flatten(-2)
    half_way = ((weights() / step).nan_to_num() % 1 - 0.5).abs() < 1e-4
    assert torch.equal(ours[~half_way], theirs[~half_way])
    assert half_way.float().mean() < 0.01
    assert ((ours - theirs).abs() <= 1.01 * step).all()


def test_a_weight_is_rounded_as_recipe_q4_stores_it(files: Files, tmp_path: Path) -> None:
    made = trainer(files, tmp_path, "draft.rank=32", "draft.conv_group=16")
    recipe = recipes.find_recipe("q4")
    for name, weight in made.optimizer.master.items():
        random = torch.randn(weight.shape, generator=rng())
        kind = recipes.type_of(recipe, export._name(name), 2) or "f32"
        want = random if kind == "f32" else stored(random, kind.upper())
        assert torch.allclose(made.as_stored(name, random), want, atol=1e-6), (name, kind)


# anchors ----------------------------------------------------------------------------------------------------------


def test_chains_move_past_what_was_accepted() -> None:
    found = sequences(3, 40)
    chains, rows = anchors.Anchors(found, 2, 4), torch.tensor([0, 2])
    at = chains.take(rows)
    chains.at[rows] = at.clamp_max(20).to(torch.int16)
    at = chains.take(rows)
    accepted = torch.tensor([0.0, 3.0, 1.0, 2.0])
    chains.walk(rows, at, accepted)
    assert torch.equal(chains.take(rows), at + 1 + accepted.long().view(2, 2))
    assert (chains.at[1] == -1).all()  # a row that was not asked for has not begun


def test_chains_start_anew_outside_replies_and_where_no_block_fits() -> None:
    found = sequences(1, 40)
    found.own[:] = False
    found.own[0, 10:14] = found.own[0, 34:] = True
    block, rows = 4, torch.tensor([0])
    chains = anchors.Anchors(found, 1, block)
    places = {10, 11, 12, 34, 35, 36}  # the next token is a reply's too, and 40 - 4 is the last that a block fits at
    seen = set()
    for start in [*range(40), -1]:
        chains.at[0, 0] = start
        at = int(chains.take(rows))
        assert at == start if start in places else at in places
        seen.add(at)
    assert seen == places
    for _ in range(50):
        chains.at[0, 0] = -1
        assert int(chains.take(rows)) in places
    chains.walk(rows, torch.tensor([[38]]), torch.tensor([3.0]))
    assert int(chains.at) == -1


def test_a_row_without_a_reply_gives_anchors_that_fit() -> None:
    found = sequences(2, 16)
    found.own[:] = False
    at = anchors.Anchors(found, 50, 4).take(torch.tensor([0, 1]))
    assert 0 <= int(at.min()) <= int(at.max()) <= 12


def test_repeated_stretches_are_begun_at_less_often() -> None:
    found = sequences(1, 103)
    found.repeated[0, :50] = True
    at = anchors.Anchors(found, 4000, 4).take(torch.tensor([0]))
    assert float((at < 50).float().mean()) == pytest.approx(1 / 11, abs=0.02)


def plain_repeats(row: list[int], run: int, furthest: int) -> list[bool]:
    found = [False] * len(row)
    for lag in range(1, furthest + 1):
        for start in range(lag, len(row) - run + 1):
            if all(row[i] == row[i - lag] for i in range(start, start + run)):
                found[start : start + run] = [True] * run
    return found


@pytest.mark.parametrize(("run", "furthest", "length"), [(4, 6, 60), (3, 2, 60), (1, 3, 20), (6, 9, 6), (6, 9, 8)])
def test_repeats_are_those_of_a_plain_loop(run: int, furthest: int, length: int) -> None:
    tokens = torch.randint(0, 3, (40, length), generator=rng())
    tokens[0, :] = 1
    want = [plain_repeats(row, run, furthest) for row in tokens.tolist()]
    assert anchors.repeats(tokens, run, furthest).tolist() == want
    assert any(map(any, want)) == (length > run)


# losses -----------------------------------------------------------------------------------------------------------


def test_weights_fall_by_slot_and_after_a_wrong_one() -> None:
    valid = torch.tensor([[True] * 4, [True] + [False] * 3, [False] * 4])
    right = torch.tensor([[True, False, True, True], [False] + [True] * 3, [True] * 4])
    fall = [math.exp(-slot / 4) for slot in range(4)]
    want = torch.tensor([[fall[0], fall[1], 0.5 * fall[2], 0.5 * fall[3]], [0.3 * fall[0], 0, 0, 0], [0] * 4])
    found = losses.slot_weights(valid, right, 4.0, 0.5, torch.tensor([1.0, 0.3, 1.0]))
    assert torch.allclose(found, want / want.sum())
    none = losses.slot_weights(valid[2:], right[2:], 4.0, 0.5, torch.ones(1))
    assert not none.any()


@pytest.mark.parametrize("columns", [64 * 16, 64 * 20 - 1, 64 * 40 + 1])
def test_the_largest_are_exact(columns: int) -> None:
    logits = torch.stack([torch.randperm(columns, generator=rng(seed)).float() for seed in range(20)])
    logits[0] = torch.arange(columns)  # all in one chunk
    values, places = losses.top(logits, 16)
    want = logits.topk(16, -1)
    assert torch.equal(values, want.values)
    assert torch.equal(places, want.indices)


@pytest.mark.parametrize("ce", [0.0, 0.3, 1.0])
def test_the_gradient_of_the_unary_loss_is_that_of_its_formula(ce: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "PIECE", 3)  # seven rows are three pieces
    logits = torch.randn(7, 50, generator=rng()).requires_grad_()
    teacher, at = torch.randn(5, 50, generator=rng(1)), torch.tensor([4, 0, 1, 1, 2, 3, 0])
    token, weight = torch.randint(0, 50, (7,), generator=rng(2)), torch.rand(7, generator=rng(3))
    loss = losses.Unary.apply(logits, teacher, at, token, weight, ce, losses.unary_piece)
    (ours,) = torch.autograd.grad(3 * loss, logits)
    log_q, p = logits.log_softmax(-1), teacher[at].softmax(-1)
    kl = (p * (p.log() - log_q)).sum(-1)
    plain = (weight * (ce * -log_q[torch.arange(7), token] + (1 - ce) * kl)).sum()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    assert torch.allclose(ours, torch.autograd.grad(3 * plain, logits)[0], atol=1e-6)


def test_a_token_that_is_no_candidate_is_learned_and_not_right() -> None:
    head, hidden = torch.eye(128), torch.zeros(2, 128)
    hidden[:, :4] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    tables = (torch.zeros(128, 8), torch.zeros(128, 8), torch.zeros(8, 128))
    logits, before = hidden @ head.T, torch.tensor([7, 7])
    found = losses.select(hidden, logits, torch.tensor([0, 99]), before, tables, head, 2)
    assert found.candidates.tolist() == [[0, 1], [0, 99]]
    assert found.scores.tolist() == [[4, 3], [4, 0]]
    assert found.right.tolist() == [True, False]
    swayed = (torch.ones(128, 8), torch.zeros(128, 8), torch.ones(8, 128))
    swayed[1][1] = 1  # whatever is before, 1 gains
    found = losses.select(hidden, logits, torch.tensor([0, 1]), before, swayed, head, 2)
    assert found.scores.tolist() == [[4, 83], [4, 83]]
    assert found.right.tolist() == [False, True]
    swayed[1][99] = 2  # best of what is scored, but not found by the logits
    assert losses.select(hidden, logits, torch.tensor([1, 99]), before, swayed, head, 2).right.tolist() == [True, False]


# optimizer --------------------------------------------------------------------------------------------------------


class Weights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = {"wide": (24, 96), "tall": (96, 24), "square": (48, 48), "predecessor": (40, 8), "norm": (24,)}
        for seed, (name, shape) in enumerate(shapes.items()):
            setattr(self, name, torch.nn.Parameter(torch.randn(shape, generator=rng(seed))))


def step(weights: Weights, optimizer: muon.Optimizer, seed: int, schedule: float = 1.0) -> None:
    for index, weight in enumerate(weights.parameters()):
        weight.grad = torch.randn(weight.shape, generator=rng(1000 * seed + index))
    optimizer.step(schedule)
    optimizer.show(lambda _, w: w)


def test_updates_of_matrices_are_near_orthogonal() -> None:
    weights = Weights()
    optimizer = muon.Optimizer(weights.named_parameters(), 0.01, 0.1)
    before = {name: weight.clone() for name, weight in optimizer.master.items()}
    step(weights, optimizer, 1, 0.5)
    for name in ("wide", "tall", "square"):
        update = (before[name] * (1 - 0.005 * 0.1) - optimizer.master[name]) / 0.005
        size = 0.2 * math.sqrt(max(update.shape))
        singular = torch.linalg.svdvals(update) / size
        assert 0.2 < float(singular.min()) < float(singular.max()) < 1.35, name
        assert float(singular.median()) == pytest.approx(1, abs=0.25), name
        assert float((update * weights.get_parameter(name).grad).sum()) > 0  # downhill
    for name in ("predecessor", "norm"):  # AdamW's first step is the rate, by sign
        update = before[name] - optimizer.master[name]
        assert torch.allclose(update, 0.005 * weights.get_parameter(name).grad.sign(), rtol=1e-2), name


def test_an_optimizer_goes_on_bit_by_bit(tmp_path: Path) -> None:
    one = Weights()
    whole = muon.Optimizer(one.named_parameters(), 0.01, 0.1)
    for seed in range(3):
        step(one, whole, seed)
    torch.save(whole.state(), tmp_path / "state.pt")
    for seed in range(3, 6):
        step(one, whole, seed)
    other = Weights()
    resumed = muon.Optimizer(other.named_parameters(), 0.01, 0.1)
    step(other, resumed, 9)
    resumed.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    resumed.show(lambda _, w: w)
    for seed in range(3, 6):
        step(other, resumed, seed)
    for name, weight in one.named_parameters():
        assert torch.equal(weight, other.get_parameter(name)), name


# a run ------------------------------------------------------------------------------------------------------------


def trainer(files: Files, out: Path, *changes: str) -> Any:
    path, _ = files.pair()
    settings = config.read(SETTINGS, [*TINY, f'target.path="{path}"', *changes])
    return train.Trainer(settings, out, "cpu", 0, 1)


def run(made: Any, until: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train up to a step: the clock counts steps."""
    monkeypatch.setattr(train.time, "time", lambda: float(made.steps))
    found = sequences(4, 24)
    found.own[:] = False
    found.own[:, 8:10] = True  # one place for an anchor, so that chance has no part
    made.order = lambda found: itertools.repeat((torch.arange(4), 0))
    made.run(found, until)


def test_a_run_in_two_pieces_is_one_in_one_piece(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    whole = trainer(files, tmp_path / "one")
    start = {name: weight.clone() for name, weight in whole.optimizer.master.items()}
    run(whole, 20, monkeypatch)
    first = trainer(files, tmp_path / "two")
    run(first, 10, monkeypatch)
    second = trainer(files, tmp_path / "two", "seed=1")
    second.load(tmp_path / "two/checkpoint.pt")
    assert (second.steps, second.elapsed) == (10, 10.0)
    run(second, 20, monkeypatch)
    assert (whole.steps, whole.elapsed) == (second.steps, second.elapsed) == (20, 20.0)
    ended, resumed = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["master"] for name in ("one", "two")
    )
    for name, weight in ended.items():
        moved = (weight - start[name]).norm()
        assert moved > 0, name
        assert (weight - resumed[name]).norm() < 1e-3 * moved, name


def test_an_epoch_has_each_row_once_and_no_batch_of_two_variants(files: Files, tmp_path: Path) -> None:
    made = trainer(files, tmp_path, 'target.variants=["", "q4_0"]')
    found = sequences(24, 24)
    found.variant = torch.tensor([0, 1, 1] * 8, dtype=torch.uint8)
    batches = list(itertools.islice(made.order(found), 12))
    for epoch in (batches[:6], batches[6:]):
        assert sorted(row for rows, _ in epoch for row in rows.tolist()) == list(range(24))
        assert all((found.variant[rows] == variant).all() for rows, variant in epoch)
    assert [rows.tolist() for rows, _ in batches[:6]] != [rows.tolist() for rows, _ in batches[6:]]


def test_warming_up_leaves_no_trace(files: Files, tmp_path: Path) -> None:
    made = trainer(files, tmp_path)
    before = {name: weight.clone() for name, weight in made.draft.named_parameters()}
    made.warm()
    assert all(torch.equal(weight, before[name]) for name, weight in made.draft.named_parameters())
    assert not any(momentum.any() for momentum in made.optimizer.momentum.values())
    assert not made.optimizer.adam.state
    assert made.steps == 0


def test_a_run_learns_what_it_reads(files: Files, tmp_path: Path) -> None:
    """One place and its label: guessed after some steps."""
    made = trainer(files, tmp_path, "train.ce=1.0", "train.peak_lr=0.01")
    found = sequences(4, 24, len(SAID))
    found.tokens = torch.tensor(SAID, dtype=torch.int32)[found.tokens.long()]
    chains, rows = anchors.Anchors(found, 2, 4), torch.arange(4)
    chains.at[:] = 8

    def accepted() -> float:
        chains.at[:] = 8
        return float(made.step(found, chains, rows, 0, 1.0, made.settings.draft.block)[2])

    first = accepted()
    for _ in range(30):
        last = accepted()
    assert first < 1.5 < 2.5 < last
