"""One pair on one device: plain decoding, our loop, upstream's and xllamacpp's, arms interleaved prompt by prompt.

Every arm has the same files, prompts and greedy settings. Figures are each program's own for the time from the end of
the prompt to the last token. The first prompt is run once more at the start, as "warm" records that no table reads.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from types import ModuleType
from typing import Callable

from tqdm import tqdm

from pyllama_dflash import Model, Speculator, cuda

from . import peer, records, startup, upstream, widths
from .records import Record, Sizes

BLOCK = 2  # verifies and drafts of each width after each run of our loop, as machines drift within minutes
REST_S = 0.3  # on the CPU threads may stay awake a while after their last graph: ours milliseconds, a peer's longer
KEYS = ("prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "draft_n", "draft_n_accepted", "n_rounds")
PARTS = ("t_draft_ms", "t_verify_ms", "t_other_ms", "histogram", "per_position")
HEAD = ("predicted_n", "predicted_ms", "draft_n", "draft_n_accepted")


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Args:
        target, draft: GGUF files.
        n_maxs: tokens drafted a round; an arm of each loop for each.
        n_predict: tokens to generate for a prompt, unless the target ends before.
        n_head: if not 0, upstream's program also runs for so many tokens, and the tables take the difference: each of
            its runs is a process, whose first rounds allocate, capture graphs and the like.
        repeats: how often the prompts are gone through.
        prompts: of records.read_prompts.
        programs: upstream's, by arm.
        module: xllamacpp, or None.
        sizes: what every arm is opened with.
    """

    target: Path
    draft: Path
    n_maxs: Sequence[int]
    n_predict: int
    n_head: int
    repeats: int
    prompts: Sequence[Record]
    programs: Mapping[str, Path]
    module: ModuleType | None
    sizes: Sizes


@dataclass(frozen=True)
class Arm:
    """A way to decode: the loop's name, n_max (0: none), and what runs a prompt's text and returns figures."""

    loop: str
    n_max: int
    run: Callable[[str], Record]

    @property
    def name(self) -> Record:
        return {"loop": self.loop, "n_max": self.n_max}


def ours(spec: Speculator, n_max: int, n_predict: int, prompt: str, ignore_eos: bool = False) -> Record:
    """Generate once; figures, text, and loop_ms: the time of the call as the caller sees it, less the prefill's."""
    spec.reset()
    launched, start = cuda.launches(), perf_counter()
    result = spec.run(prompt, max_tokens=n_predict, n_max=n_max or None, ignore_eos=ignore_eos)
    wall_ms = 1000 * (perf_counter() - start)
    figures = result.stats.to_dict()
    loop = {"loop_ms": wall_ms - result.stats.prompt_ms, "text": result.text}
    if launched:  # prefill included
        loop["n_launches"] = cuda.launches() - launched
    return {**{key: figures[key] for key in (*KEYS, *PARTS)}, **loop}


def theirs(plan: Plan, program: Path, n_max: int, prompt: str) -> Record:
    """Run upstream's program once, and once for its first tokens if they are to be told apart."""
    go = functools.partial(upstream.run, program, plan.target, plan.draft, prompt, n_max=n_max, sizes=plan.sizes)
    figures = go(n_predict=plan.n_predict)
    if not plan.n_head:
        return figures
    head = go(n_predict=plan.n_head)
    return {**figures, "head": {key: head[key] for key in HEAD}}


def arms(plan: Plan, plain: Speculator, spec: Speculator) -> list[Arm]:
    found = [Arm("plain", 0, functools.partial(ours, plain, 0, plan.n_predict))]
    for n_max in plan.n_maxs:
        found.append(Arm("ours", n_max, functools.partial(ours, spec, n_max, plan.n_predict)))
        for name, program in plan.programs.items():
            found.append(Arm(name, n_max, functools.partial(theirs, plan, program, n_max)))
        if plan.module:
            server = peer.serve(plan.module, plan.target, plan.draft, n_max, plan.sizes)
            found.append(Arm(peer.NAME, n_max, functools.partial(peer.run, server, n_predict=plan.n_predict)))
    return found


def like_upstream(spec: Speculator, n_max: int, n_predict: int, prompt: str) -> Record:
    """Count drafted and accepted tokens by upstream's rule for the end, so that both counts cover the same rounds.

    Its loop goes on until more than n_predict tokens are out, cuts a draft to what is missing less one unless that is
    nothing, and counts what follows an end-of-generation token otherwise, so that a last round alone may differ.
    """
    spec.reset()
    spec.prefill(prompt)
    emitted = drafted = accepted = 0
    while emitted <= n_predict:
        room = n_predict - emitted - 1
        draft = spec.draft(n_max=n_max).tokens[: room if room > 0 else n_max]
        verdict = spec.verify(draft)
        drafted, accepted = drafted + len(draft), accepted + len(verdict.accepted)
        emitted += len(verdict.accepted) + 1
        if any(map(spec.target.is_eog, (*verdict.accepted, verdict.bonus))):
            break
    return {"predicted_n": emitted, "draft_n": drafted, "draft_n_accepted": accepted}


def provenance(plan: Plan) -> Record:
    files = {"target": plan.target, "draft": plan.draft, **plan.programs}
    options = {name: getattr(plan, name) for name in ("n_maxs", "n_predict", "n_head", "repeats")}
    if plan.module:
        options[peer.NAME] = peer.version(plan.module)
    return records.provenance(files, n_prompts=len(plan.prompts), **options, **vars(plan.sizes))


def measure(plan: Plan) -> Iterator[Record]:
    """Yield the provenance, what starting costs, then for each prompt a record for each arm and the floor's costs."""
    target, draft, sizes = plan.target, plan.draft, plan.sizes
    yield provenance(plan)
    yield from startup.measure(target, draft, plan.n_maxs, plan.prompts[0]["text"], plan.n_predict, sizes)
    with Model(target, n_gpu_layers=sizes.n_gpu_layers) as model:
        with startup.open_ours(model, None, sizes) as plain, startup.open_ours(model, draft, sizes) as spec:
            yield from compare(plan, plain, spec)


def compare(plan: Plan, plain: Speculator, spec: Speculator) -> Iterator[Record]:
    """Yield the records of the arms, interleaved, each prompt beginning with another arm."""
    ways = arms(plan, plain, spec)
    fits = range(1, max(plan.n_maxs) + 2)
    rest = 0 if plan.sizes.on_gpu else REST_S
    list(widths.block(spec, fits, BLOCK))
    turns = [(repeat, prompt) for repeat in range(plan.repeats) for prompt in plan.prompts]
    for turn, (repeat, prompt) in enumerate(tqdm([(-1, plan.prompts[0]), *turns], file=sys.stderr)):
        text = spec.target.apply_chat_template(prompt["text"])
        base = {"record": "warm" if repeat < 0 else "run", "repeat": max(repeat, 0)}
        base |= {"prompt": prompt["prompt"], "kind": prompt["kind"]}
        n_prompt = set()
        for arm in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            sleep(rest)
            others = records.Others()
            figures = arm.run(text)
            n_prompt.add(figures["prompt_n"])
            yield {**base, **arm.name, **figures, "others": others.share()}
            if arm.loop == "ours" and repeat >= 0:
                yield from ({**base, **row} for row in widths.block(spec, fits, BLOCK))
        assert len(n_prompt) == 1, f"the arms disagree on the tokens of prompt {prompt['prompt']}: {n_prompt}"
        if not repeat and plan.programs:
            for n_max in plan.n_maxs:
                count = like_upstream(spec, n_max, plan.n_predict, text)
                yield {**base, "record": "count", "n_max": n_max, **count}
