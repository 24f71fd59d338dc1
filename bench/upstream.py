"""Upstream's own DFlash loop, llama-speculative-simple, built on demand from the pinned source and run as a process.

Two builds of it: PATCHED has all of the library's patches, PINNED is what users of upstream have today, with patch 0001
only, without which an AMX machine cannot run it. Both keep upstream's default OpenMP: the program attaches no thread
pool, so that without OpenMP each graph would start threads of its own, and a round would take half as long again.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from .records import Record, Sizes

ROOT = Path(__file__).resolve().parents[1]
NAME = "llama-speculative-simple"

# What the program needs beyond the library's own tree.
MORE = ("common/", "examples/", "pocs/", "tools/*", "vendor/")
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "GGML_OPENMP": "ON",
    "LLAMA_BUILD_EXAMPLES": "ON",
    "LLAMA_BUILD_TOOLS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
}


@dataclass(frozen=True)
class Tree:
    """A copy of the pinned source and its build, in build/NAME.

    Args:
        name: folder, and name of the arm.
        upto: number of the last patch to apply; None: all.
    """

    name: str
    upto: int | None = None

    @property
    def source(self) -> Path:
        return ROOT / "build" / self.name / "llama.cpp"

    @property
    def binaries(self) -> Path:
        return ROOT / "build" / self.name / "build"

    def program(self) -> Path:
        """Build the program and return its path; nothing is done where it is built, or was brought without source.

        The variable CMAKE_ARGS, which pip builds with, serves here too.
        """
        program = self.binaries / "bin" / NAME
        if program.exists() and not self.source.exists():
            return program
        sys.path.insert(0, str(ROOT / "vendor"))
        import pinned

        import vendor

        vendor.sync(self.source, keep=(*pinned.KEEP, *MORE), upto=self.upto)
        defines = dict(OPTIONS)
        if shutil.which("ccache"):
            defines |= {"CMAKE_C_COMPILER_LAUNCHER": "ccache", "CMAKE_CXX_COMPILER_LAUNCHER": "ccache"}
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        settings = [f"-D{name}={value}" for name, value in defines.items()]
        settings += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        folders = ["-S", str(self.source), "-B", str(self.binaries)]
        subprocess.run(["cmake", *folders, *generator, *settings], check=True, stdout=sys.stderr)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count())
        build = ["cmake", "--build", str(self.binaries), "--target", NAME, "--parallel", jobs]
        subprocess.run(build, check=True, stdout=sys.stderr)
        return program


PATCHED = Tree("upstream")
PINNED = Tree("upstream-pinned", upto=1)


def run(program: Path, target: Path, draft: Path, prompt: str, *, n_max: int, n_predict: int, sizes: Sizes) -> Record:
    """Generate once, greedily; figures of the program's own report.

    Returns:
        prompt_n, prompt_ms, predicted_n, predicted_ms, draft_n, draft_n_accepted, text, which goes on a little beyond
        n_predict, and wall_ms of the whole process.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompt.txt"
        file.write_text(prompt + "\n", encoding="utf-8")  # the program drops one newline at the end
        models = ["-m", str(target), "-md", str(draft), "--spec-type", "draft-dflash", "--spec-draft-n-max", str(n_max)]
        layers = "all" if sizes.n_gpu_layers < 0 else str(sizes.n_gpu_layers)
        limits = ["-n", str(n_predict), "-c", str(sizes.n_ctx), "-t", str(sizes.n_threads), "--temp", "0"]
        cache = ["-ctk", sizes.type_k, "-ctv", sizes.type_v, "-fa", sizes.flash_attn]
        device = ["-ngl", layers, "-ngld", layers]
        command = [str(program), *models, *limits, *device, *cache, "--no-escape", "-f", str(file)]
        start = perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        wall_ms = 1000 * (perf_counter() - start)
    report = done.stdout + done.stderr
    timed = {name: (int(n), 1000 * float(s)) for name, n, s in re.findall(TIMED, report)}
    if done.returncode or set(timed) != {"encoded", "decoded"}:
        raise RuntimeError(f"{' '.join(command)} failed:\n{report[-2000:]}")
    counts = {name: int(n) for name, n in re.findall(r"(n_drafted|n_accept)\s*=\s*(\d+)", report)}
    return {
        "prompt_n": timed["encoded"][0],
        "prompt_ms": timed["encoded"][1],
        "predicted_n": timed["decoded"][0],
        "predicted_ms": timed["decoded"][1],
        "draft_n": counts["n_drafted"],
        "draft_n_accepted": counts["n_accept"],
        "text": done.stdout.partition(prompt)[2].rstrip(),
        "wall_ms": wall_ms,
    }


TIMED = r"(encoded|decoded)\s+(\d+) tokens in\s+([\d.]+) seconds"
