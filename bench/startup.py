"""What the first run of a process costs: opening, and the first generation against a second one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

from pyllama_dflash import Speculator

from .records import Record, Sizes


def open_ours(target: Path, draft: Path | None, sizes: Sizes) -> Speculator:
    """Open a pair by its paths; draft=None: plain decoding."""
    return Speculator(
        target,
        draft,
        n_ctx=sizes.n_ctx,
        n_threads=sizes.n_threads,
        n_gpu_layers=sizes.n_gpu_layers,
        n_gpu_layers_draft=-1 if draft is None else sizes.n_gpu_layers,
    )


def first(target: Path, draft: Path, n_max: int, message: str, n_predict: int, sizes: Sizes) -> Record:
    """Open, generate, forget, generate the same again.

    Returns:
        open_ms; first_ms and again_ms, each of prompt and reply; predicted_n.
    """
    start = perf_counter()
    with open_ours(target, draft if n_max else None, sizes) as spec:
        times = [perf_counter() - start]
        for _ in range(2):
            spec.reset()
            start = perf_counter()
            result = spec.run(messages=message, max_tokens=n_predict, n_max=n_max or None)
            times.append(perf_counter() - start)
    names = ("open_ms", "first_ms", "again_ms")
    return {**{name: 1000 * time for name, time in zip(names, times)}, "predicted_n": result.stats.predicted_n}


def measure(
    target: Path, draft: Path, n_maxs: Sequence[int], message: str, n_predict: int, sizes: Sizes
) -> Iterator[Record]:
    """Yield a record for each of our arms, each in a process of its own: a device starts once in a process.

    The files are in the system's cache: their hashes were taken before.
    """
    for n_max in (0, *n_maxs):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            figures = pool.submit(first, target, draft, n_max, message, n_predict, sizes).result()
        yield {"record": "start", "loop": "ours" if n_max else "plain", "n_max": n_max, **figures}
