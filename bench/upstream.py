"""Upstream's own DFlash loop, llama-speculative-simple, built on demand from the pinned source and run as a process."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / "build" / "upstream" / "llama.cpp"
BUILD = ROOT / "build" / "upstream" / "build"
PROGRAM = BUILD / "bin" / "llama-speculative-simple"

# What the program needs beyond the library's own tree.
MORE = ("common/", "examples/", "pocs/", "tools/*", "vendor/")
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "GGML_OPENMP": "OFF",
    "LLAMA_BUILD_EXAMPLES": "ON",
    "LLAMA_BUILD_TOOLS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
}


def build(options: dict[str, str] | None = None) -> Path:
    """Build the program with the library's patches and compiler, so that only the loop differs; no work if it is built.

    A program that was brought along without its source is taken as it is.
    """
    if PROGRAM.exists() and not TREE.exists():
        return PROGRAM
    sys.path.insert(0, str(ROOT / "vendor"))
    import pinned

    import vendor

    vendor.sync(TREE, keep=(*pinned.KEEP, *MORE))
    defines = {**OPTIONS, **(options or {})}
    if shutil.which("ccache"):
        defines |= {"CMAKE_C_COMPILER_LAUNCHER": "ccache", "CMAKE_CXX_COMPILER_LAUNCHER": "ccache"}
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    settings = [f"-D{name}={value}" for name, value in defines.items()]
    subprocess.run(["cmake", "-S", str(TREE), "-B", str(BUILD), *generator, *settings], check=True, stdout=sys.stderr)
    target = ["--target", "llama-speculative-simple", "--parallel"]
    subprocess.run(["cmake", "--build", str(BUILD), *target], check=True, stdout=sys.stderr)
    return PROGRAM


def run(
    target: str, draft: str, prompt: str, *, n_max: int, n_predict: int, n_threads: int, n_ctx: int
) -> dict[str, float]:
    """Generate once, greedily; figures of the program's own report.

    Returns:
        predicted_n, predicted_ms, draft_n, draft_n_accepted.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompt.txt"
        file.write_text(prompt + "\n", encoding="utf-8")  # the program drops one newline at the end
        models = ["-m", target, "-md", draft, "--spec-type", "draft-dflash", "--spec-draft-n-max", str(n_max)]
        sizes = ["-n", str(n_predict), "-c", str(n_ctx), "-t", str(n_threads), "--temp", "0"]
        command = [str(PROGRAM), *models, *sizes, "-f", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    report = done.stdout + done.stderr
    decoded = re.search(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds", report)
    if done.returncode or not decoded:
        raise RuntimeError(f"{' '.join(command)} failed:\n{report[-2000:]}")
    counts = {name: int(n) for name, n in re.findall(r"(n_drafted|n_accept)\s*=\s*(\d+)", report)}
    return {
        "predicted_n": int(decoded[1]),
        "predicted_ms": 1000 * float(decoded[2]),
        "draft_n": counts["n_drafted"],
        "draft_n_accepted": counts["n_accept"],
    }
