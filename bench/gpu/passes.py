"""The passes of `python -m bench shape`: all arms on one open pair, interleaved."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
from tqdm import tqdm

from pyllama_dflash import Model, Speculator

from .. import records, rounds, startup, widths
from ..records import Record, Sizes
from . import files, given
from .matrix import NO_GRAPHS
from .shape import Plan

WIDEST = 16
BLOCK = 5  # verifies of each width in a pass


def measure(plan: Plan) -> Iterator[Record]:
    """Yield the provenance, the pair's sizes, a check of its outputs, then the records of all passes."""
    options = {field.name: getattr(plan, field.name) for field in dataclasses.fields(Plan)}
    options |= {"shape": dataclasses.asdict(plan.shape), "sizes": vars(plan.sizes), "models": str(plan.models)}
    options |= {"graphs": NO_GRAPHS not in os.environ, "upstream": str(plan.upstream or "")}
    yield records.provenance({"upstream": plan.upstream}, **options)
    pair = files.write(plan.shape, plan.models, plan.seed)
    yield files.sizes(plan.shape, pair)
    start = perf_counter()
    with Model(pair.target, n_gpu_layers=plan.sizes.n_gpu_layers) as model:
        yield {"record": "opened", "ms": 1000 * (perf_counter() - start)}
        prompt = text(model, plan.n_prompt, plan.seed)
        yield check(model, model.tokenize(prompt), plan.sizes)
        with startup.open_ours(model, None, plan.sizes, n_max=WIDEST - 1) as plain:
            with startup.open_ours(model, pair.draft, plan.sizes) as spec:
                yield from Passes(plan, pair.target, pair.draft, plain, spec, prompt).all()


def text(model: Model, n_tokens: int, seed: int) -> str:
    """Random words, some n_tokens tokens of them."""
    rng = random.Random(seed)  # noqa: S311 - it protects nothing
    words: list[str] = []
    n = 0
    while n < n_tokens:
        words.append("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=5)))
        n += len(model.tokenize(f" {words[-1]}"))  # no token spans two words
    return " ".join(words)


def check(model: Model, tokens: Sequence[int], sizes: Sizes) -> Record:
    """Say how the logits of the prompt's last rows look, and how many of them choose tokens of their own."""
    small = dataclasses.replace(sizes, n_ctx=512)
    tail = list(tokens[-WIDEST:])
    with startup.open_ours(model, None, small, n_max=WIDEST - 1, backend_argmax=False) as spec:
        spec.prefill(list(tokens[: len(tokens) - WIDEST + 1])[-256:])
        chosen = spec.verify(tail[1:]).chosen
        logits = spec.logits()
    assert np.isfinite(logits).all(), "logits are not finite"
    return {"record": "check", "n_distinct": len(set(chosen)), "n_rows": len(chosen), "std": float(logits.std())}


class Passes:
    """The arms on one open pair, one pass after the other."""

    def __init__(self, plan: Plan, target: Path, draft: Path, plain: Speculator, spec: Speculator, prompt: str) -> None:
        self.plan, self.plain, self.spec, self.prompt = plan, plain, spec, prompt
        self.tokens = spec.target.tokenize(prompt)
        deep = spec.target.tokenize(text(spec.target, plan.depth, plan.seed + 1)) if plan.depth else []
        self.deep = deep[: plan.depth]
        spec.reset()
        self.known = spec.run(self.tokens, max_tokens=plan.n_predict, ignore_eos=True, n_max=plan.n_max).tokens
        numbers = {"n_predict": plan.n_predict, "prompt": prompt, "ignore_eos": True}
        self.runs = {
            ("plain", 0): functools.partial(rounds.ours, plain, 0, **numbers),
            ("ours", plan.n_max): functools.partial(rounds.ours, spec, plan.n_max, **numbers),
        }
        if plan.upstream:
            lengths = (plan.n_predict, plan.n_head, plan.repeats)
            theirs = rounds.Plan(target, draft, [plan.n_max], *lengths, [], {}, None, plan.sizes)
            go = functools.partial(rounds.theirs, theirs, plan.upstream, plan.n_max, prompt)
            self.runs["upstream", plan.n_max] = go

    def all(self) -> Iterator[Record]:
        """Yield the records of all passes but the first, which warms up."""
        for repeat in tqdm(range(-1, self.plan.repeats), file=sys.stderr):
            for row in self.one(repeat):
                if repeat >= 0:
                    yield {**row, "repeat": repeat}

    def one(self, repeat: int) -> Iterator[Record]:
        for (loop, n_max), run in list(self.runs.items()):
            if repeat < 0 and loop == "upstream":
                continue  # a process of its own: nothing stays warm
            others = records.Others()
            base = {"record": "run", "prompt": 0, "kind": "random", "loop": loop, "n_max": n_max}
            try:
                figures = run()
            except RuntimeError as error:
                if loop != "upstream":
                    raise
                del self.runs[loop, n_max]
                yield {"record": "failed", "what": loop, "reason": str(error)}
                continue
            yield {**base, **figures, "others": others.share()}
        yield from self.givens(repeat)
        for depth, tokens in ((0, self.tokens), (self.plan.depth, self.deep)):
            if tokens:
                yield from ({**row, "depth": depth} for row in self.costs(tokens))

    def givens(self, repeat: int) -> Iterator[Record]:
        for mean_len in self.plan.mean_lens:
            seed = self.plan.seed + repeat + 1
            yield given.run(self.spec, self.tokens, self.known, mean_len, self.plan.n_max, seed)

    def costs(self, tokens: Sequence[int]) -> Iterator[Record]:
        """Yield what a prefill and verifies of each width cost after the tokens, without taps and with, and drafts."""
        for loop, spec, widest in (("plain", self.plain, WIDEST), ("ours", self.spec, self.plan.n_max + 1)):
            spec.reset()
            start = perf_counter()
            spec.prefill(tokens)
            spec.verify([])  # ends when the prompt has been evaluated, its last token included
            yield {"record": "prefill", "loop": loop, "n": len(tokens), "ms": 1000 * (perf_counter() - start)}
            yield from widths.block(spec, range(1, widest + 1), BLOCK, tokens)
