"""The libraries to measure: built here from the synced source, or brought along; and what each says of itself."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from argparse import ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path

from .. import records
from ..records import Record
from . import process

LIBRARY = "PYLLAMA_DFLASH_LIBRARY"
# Run where the library is the one asked about: importing the package loads it.
PROBE = """
import sys
from pathlib import Path
from bench import records
records.write(Path(sys.argv[1]), [records.provenance({})])
"""


@dataclass(frozen=True)
class Library:
    """A shared library by the name that the tables give it."""

    name: str
    path: Path

    @classmethod
    def parse(cls, text: str) -> Library:
        """Read NAME=PATH."""
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ArgumentTypeError(f"{text!r} is not NAME=PATH")
        return cls(name, Path(path).resolve())


def settings(arch: str, llama_dir: Path | None) -> list[str]:
    """What the build is configured with; the variable CMAKE_ARGS, which pip builds with, comes last and wins."""
    defines = {"CMAKE_BUILD_TYPE": "Release", "GGML_CUDA": "ON", "CMAKE_CUDA_ARCHITECTURES": arch}
    if llama_dir:
        defines["PYLLAMA_DFLASH_LLAMA_DIR"] = str(llama_dir.resolve())
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    given = shlex.split(os.environ.get("CMAKE_ARGS", ""))
    return [*generator, *[f"-D{name}={value}" for name, value in defines.items()], *given]


def build(arch: str, llama_dir: Path | None, limit_s: float) -> tuple[Library, Record]:
    """Build the library into build/gpu/arch-ARCH, or what changed of it; its record is "failed" if that failed."""
    folder = process.ROOT / "build" / "gpu" / f"arch-{arch.replace(';', '-')}"
    configure = ["cmake", "-S", str(process.ROOT), "-B", str(folder), *settings(arch, llama_dir)]
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(len(os.sched_getaffinity(0)))
    compile_ = ["cmake", "--build", str(folder), "--target", "pyllama_dflash", "--parallel", jobs]
    library = Library(f"arch {arch}", folder / "libpyllama_dflash.so")
    seconds = 0.0
    for command in (configure, compile_):
        ended = process.run(command, process.environment(), limit_s - seconds)
        seconds += ended.seconds
        if ended.code != 0:
            return library, failed("build", ended) | {"library": library.name}
    return library, {"record": "build", "library": library.name, "seconds": seconds, "settings": configure[5:]}


def failed(what: str, ended: process.Ended) -> Record:
    """The record of a run that did not do its work."""
    return {"record": "failed", "what": what, "reason": ended.reason, "seconds": ended.seconds, "tail": ended.tail}


def probe(library: Library, limit_s: float) -> Record:
    """Load the library in a process of its own; its provenance, or the record of its failure."""
    env = process.environment(**{LIBRARY: str(library.path)})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "provenance.jsonl"
        ended = process.run(process.python("-c", PROBE, str(out)), env, limit_s)
        if ended.code != 0:
            return failed("load", ended) | {"library": library.name}
        row = records.read(out)[0]
    file = {"file": library.path.name, "bytes": library.path.stat().st_size, "sha256": records.sha256(library.path)}
    return {**row, "library": library.name, "files": {"library": file}}
