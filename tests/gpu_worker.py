"""Run a pair in a process of its own: python gpu_worker.py JOB. CUDA reads its variables once in a process.

JOB is JSON: target, draft, options of Speculator; prompt and n, tokens to say; or scored, tokens, and widths. Prints
JSON: tokens, launches, and for each width the logits' norm and the file that holds them.
"""

from __future__ import annotations

import json
import sys

import numpy as np

import pyllama_dflash as pd
from pyllama_dflash import cuda


def main() -> None:
    job = json.loads(sys.argv[1])
    out = {}
    with pd.Speculator(job["target"], job.get("draft"), **job.get("options", {})) as spec:
        if "n" in job:
            before = cuda.launches()
            result = spec.run(job["prompt"], max_tokens=job["n"], ignore_eos=True)
            out |= {"tokens": result.tokens, "launches": cuda.launches() - before, "mean_len": result.stats.mean_len}
        if "widths" in job:
            tokens = [int(token) for token in job["scored"]]
            n = max(job["widths"])
            for width in job["widths"]:
                spec.reset()
                spec.prefill(tokens[:-n])
                with cuda.trace() as kernels:
                    spec.verify(tokens[-n:][: width - 1])
                np.save(f"{job['folder']}/{width}.npy", spec.logits())
                out.setdefault("kernels", {})[str(width)] = kernels
    print(json.dumps(out))


if __name__ == "__main__":
    main()
