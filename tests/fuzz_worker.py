"""Open damaged files and say what came of it; run in a process of its own.

Each line of input is JSON: a name, a pair of files, which of them is damaged, and how: the number of the damage, a key
and the number of its value, or the path of a file to take instead. Each line of output is the name of what comes next,
or a name with the outcome.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from pathlib import Path

import damage

import pyllama_dflash as pd

PROMPT = list(range(40, 60))


def refusal(target: Path, draft: Path) -> str:
    """What inspect() has against a pair, empty if nothing."""
    try:
        return "; ".join(pd.inspect(draft, target, n_ctx=128).mismatches)
    except (pd.DFlashError, MemoryError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def attempt(target: Path, draft: Path) -> str:
    refused = refusal(target, draft)
    outcome = opening(target, draft)
    return f"opens, but inspect() says {refused}" if refused and outcome.startswith("ok") else outcome


def opening(target: Path, draft: Path) -> str:
    try:
        with pd.Speculator(target, draft, n_ctx=128, n_threads=1) as spec:
            result = spec.run(PROMPT, max_tokens=8, ignore_eos=True)
            return f"ok {len(result.tokens)}"
    except (pd.DFlashError, MemoryError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # a huge allocation fails and does not swap
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.gguf"
        for line in sys.stdin:
            job = json.loads(line)
            print(json.dumps([job["name"]]), flush=True)
            whole = Path(job["target"] if job["damaged"] == "target" else job["draft"])
            if "key" in job:
                path.write_bytes(damage.value_damage(whole, job["key"].encode(), job["number"]))
            elif "number" in job:
                path.write_bytes(damage.damage(whole, job["number"], job.get("laid_out", False)))
            damaged = Path(job.get("path", path))
            pair = {"target": Path(job["target"]), "draft": Path(job["draft"]), job["damaged"]: damaged}
            outcome = attempt(pair["target"], pair["draft"])
            print(json.dumps([job["name"], outcome]), flush=True)


if __name__ == "__main__":
    main()
