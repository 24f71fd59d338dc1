"""What the first run of a process costs: opening, and the first generation against a second one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from .records import Record, Sizes

if TYPE_CHECKING:
    from pyllama_dflash import Model, Speculator


def open_ours(target: Model | Path, draft: Path | None, sizes: Sizes, **options: Any) -> Speculator:
    """Open a pair; draft=None: plain decoding. A target that is open keeps its own layers on the GPU."""
    from pyllama_dflash import Speculator  # not above: a file of records can be read where there is no library

    options |= {name: getattr(sizes, name) for name in ("n_ctx", "n_threads", "type_k", "type_v", "flash_attn")}
    if isinstance(target, Path):
        options["n_gpu_layers"] = sizes.n_gpu_layers
    if draft is not None:
        options["n_gpu_layers_draft"] = sizes.n_gpu_layers
    return Speculator(target, draft, **options)


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
