"""PyPI's xllamacpp, where it can be imported: upstream's server with its DFlash loop, in process."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from .records import Record, Sizes

NAME = "xllamacpp"
KEYS = ("prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "draft_n", "draft_n_accepted")


def find(sizes: Sizes) -> ModuleType | None:
    """The module; None, and a line on stderr, where it is not installed or would not run on the device that we use."""
    try:
        module = import_module(NAME)
    except ImportError as error:
        print(f"without {NAME}: {error}; pip install {NAME}", file=sys.stderr)
        return None
    if sizes.on_gpu and all("CPU" in str(device["type"]) for device in module.get_device_info()):
        print(f"without {NAME}: it has no GPU backend", file=sys.stderr)
        return None
    return module


def version(module: ModuleType) -> str:
    """Its version and the processor features that it was built with."""
    return f"{module.__version__} {module.get_system_info()}"


def serve(module: ModuleType, target: Path, draft: Path, n_max: int, sizes: Sizes) -> Any:
    """Open a server of one slot; a request cannot change n_max."""
    params = module.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(target), sizes.n_ctx, 1
    params.verbosity, params.cache_ram_mib, params.fit_params = 1, 0, False
    speculative = params.speculative
    speculative.types = [module.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH]
    speculative.draft.mparams.path, speculative.draft.n_max = str(draft), n_max
    if sizes.n_gpu_layers >= 0:
        params.n_gpu_layers = speculative.draft.n_gpu_layers = sizes.n_gpu_layers
    pools = (params.cpuparams, params.cpuparams_batch)
    for pool in (*pools, speculative.draft.cpuparams, speculative.draft.cpuparams_batch):
        pool.n_threads = sizes.n_threads
    return module.Server(params)


def run(server: Any, prompt: str, n_predict: int) -> Record:
    """Generate once, greedily; figures of the server's own report.

    Its predicted_ms starts when the first token is out, which is in predicted_n all the same: a little in its favour.

    Returns:
        KEYS of its "timings", and text.
    """
    request = {"prompt": prompt, "max_tokens": n_predict, "temperature": 0, "cache_prompt": False}
    reply = server.handle_completions(request)
    return {**{key: reply["timings"][key] for key in KEYS}, "text": reply["choices"][0]["text"]}
