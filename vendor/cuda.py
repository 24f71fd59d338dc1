"""Find the CUDA toolkit to build with: `python vendor/cuda.py --arch 61` says which there are and which one serves.

CUDA 13 cannot build for Pascal and Volta any more, so a card of these needs one from 11.8 to 12.9 beside what else is
installed. The build asks here, so that it takes a toolkit that suits the architectures, a host compiler that the
toolkit takes, and no tool of another toolkit that happens to be earlier on PATH.

Debian and Ubuntu have CUDA 11.8 in `nvidia-cuda-toolkit` (component non-free, or multiverse), which needs `g++-11`.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda-*/bin", "/opt/cuda/bin", "/usr/bin")
OLDEST = (11, 8)
# First architecture, the toolkit that knows it and all up to the next row, and the first that has dropped it.
SUPPORT = ((50, (11, 8), (13, 0)), (75, (11, 8), None), (91, (12, 8), None), (121, (12, 9), None))
HOST_COMPILERS = ("", *(f"g++-{major}" for major in range(15, 8, -1)))
LIMIT_S = 300  # for each program that is asked: one that hangs would hang the build
WORDS = ("all", "all-major", "native")  # that CMake takes for architectures, beside numbers
PROBE = """#include <cublas_v2.h>
__global__ void probe(int * x) {
#if __CUDA_ARCH__ >= 610
    *x = __dp4a(x[1], x[2], x[3]);
#endif
}
#include <string>
std::string host(int * x) { probe<<<1, 1>>>(x); return std::to_string(*x); }
"""

Version = tuple[int, ...]


class CudaError(Exception):
    """What is missing; the message ends with the next step."""


class Toolkit(NamedTuple):
    """A toolkit that compiles.

    Args:
        nvcc: its compiler.
        version: of its compiler, as "11.8".
        host: the host compiler to name to it, "" for the one that it takes by itself.
        path: folder of its tools, to be first on PATH wherever it is run; "" if only nvcc knows.
    """

    nvcc: Path
    version: str
    host: str
    path: str


def ask(command: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Run a program: its exit code and what it printed, in whatever encoding; code 127 if it does not run or end."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=environ, timeout=LIMIT_S
        )
    except OSError as error:
        return 127, "", str(error)
    except subprocess.TimeoutExpired:
        return 127, "", f"{command[0]} did not end in {LIMIT_S} s"
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


def version_of(nvcc: Path) -> str | None:
    code, text, _ = ask([str(nvcc), "--version"])
    found = re.search(r"release (\d+\.\d+)", text) if code == 0 else None
    return found.group(1) if found else None


def located(compiler: str) -> Path:
    """A compiler as it is named, found on PATH, from the root on: the build runs in another folder."""
    return Path(os.path.abspath(shutil.which(compiler) or compiler))  # noqa: PTH100 - Path would follow links


def number(version: str) -> Version:
    return tuple(map(int, version.split(".")))


def named(environ: Mapping[str, str]) -> list[Path]:
    """The compiler that the user names, or that of the folder that the user names: no other is tried then."""
    if compiler := environ.get("CUDACXX"):
        return [located(compiler)]
    for name in ("CUDAToolkit_ROOT", "CUDA_PATH", "CUDA_HOME"):
        if folder := environ.get(name):
            return [Path(folder) / "bin" / "nvcc"]
    return []


def installed(environ: Mapping[str, str]) -> list[Path]:
    """Compilers on PATH, in its order, then those in the usual places."""
    folders = [Path(folder) for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    for place in PLACES:
        folders += sorted(Path("/").glob(place.lstrip("/")), reverse=True)
    found = [
        folder / "nvcc" for folder in folders if (folder / "nvcc").is_file() and os.access(folder / "nvcc", os.X_OK)
    ]
    return list({nvcc.resolve(): nvcc for nvcc in reversed(found)}.values())[::-1]


def machine_archs() -> list[int]:
    """Compute capabilities of this machine's cards, 61 for 6.1."""
    _, text, _ = ask(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    return [int(major + minor) for major, minor in re.findall(r"^(\d+)\.(\d)$", text, re.MULTILINE)]


def arch_numbers(archs: str) -> list[int]:
    """Numbers of a CMAKE_CUDA_ARCHITECTURES list; those of this machine's cards for "" and "native".

    Raises:
        CudaError: an entry is no architecture: CMake would find out much later, or never.
    """
    if archs in ("", "native"):
        return machine_archs()
    numbers = []
    for entry in filter(None, re.split(r"[;,\s]+", archs)):
        found = re.fullmatch(r"([0-9]{2,3})[af]?(-real|-virtual)?", entry)
        if found:
            numbers.append(int(found.group(1)))
        elif entry not in WORDS:
            text = f"CMAKE_CUDA_ARCHITECTURES={archs}: {entry!r} is no architecture"
            raise CudaError(f"{text}\nnext: give the compute capability without the dot, 61 for 6.1; several as 61;90")
    return numbers


def refusal(version: str, archs: Sequence[int]) -> str | None:
    """Why a toolkit of this version cannot build for these architectures, or None."""
    if number(version) < OLDEST:
        return f"CUDA {version} is older than {'.'.join(map(str, OLDEST))}"
    for arch in archs:
        known = [row for row in SUPPORT if row[0] <= arch]
        if not known or number(version) < known[-1][1]:
            return f"CUDA {version} cannot build sm_{arch}"
        dropped = known[-1][2]
        if dropped and number(version) >= dropped:
            return f"CUDA {version} cannot build sm_{arch}: CUDA 13 dropped Maxwell, Pascal (sm_61) and Volta"
    return None


def compiles(nvcc: Path, arch: int | None, host: str, path: str) -> str | None:
    """Compile a kernel down to machine code; None, or what the compiler said."""
    environ = {**os.environ, "LC_ALL": "C"}  # what it says is looked into
    if path:
        environ["PATH"] = path + os.pathsep + environ.get("PATH", "")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cu"
        source.write_text(PROBE, encoding="ascii")
        target = [f"-arch=sm_{arch}"] if arch else []
        command = [str(nvcc), *target, *(["-ccbin", host] if host else []), "-std=c++17", "-c", str(source)]
        code, out, err = ask([*command, "-o", f"{source}.o"], environ)
    return (err or out or f"exit code {code}").strip() if code else None


def probe(nvcc: Path, version: str, archs: Sequence[int], host: str = "") -> Toolkit | str:
    """The toolkit with the host compiler and PATH that work, or what the compiler said at the first try."""
    if host and not shutil.which(host):
        return f"there is no host compiler {host}"
    arch = min(archs, default=None)
    tools = [str(place) for place in (nvcc.parent, Path("/usr/bin")) if (place / "ptxas").exists()] + [""]
    first = None
    for path in dict.fromkeys(tools):
        for name in (host,) if host else HOST_COMPILERS:
            if name and not shutil.which(name):
                continue
            said = compiles(nvcc, arch, name, path)
            if said is None:
                return Toolkit(nvcc, version, name, path)
            first = first or said
    return first or "no host compiler was found"


def choose(archs: str = "", compiler: str = "", host: str = "", environ: Mapping[str, str] = os.environ) -> Toolkit:
    """The first toolkit that can build for the architectures and does compile.

    Args:
        archs: as CMAKE_CUDA_ARCHITECTURES.
        compiler: an nvcc; no other is tried then.
        host: a host compiler; no other is tried then.
        environ: for CUDACXX, CUDAToolkit_ROOT, CUDA_PATH, CUDA_HOME and PATH.
    """
    numbers, reasons = arch_numbers(archs), []
    candidates = [located(compiler)] if compiler else named(environ)
    for nvcc in candidates or installed(environ):
        version = version_of(nvcc)
        if version is None:
            missing = f"{nvcc} does not exist"
            reasons.append(f"{nvcc} --version gave no version" if nvcc.exists() else missing)
            continue
        reason = refusal(version, numbers)
        if reason is None:
            found = probe(nvcc, version, numbers, host)
            if isinstance(found, Toolkit):
                return found
            reason = f"does not compile:\n{found}"
        reasons.append(f"{nvcc}: {reason}")
    raise CudaError("\n".join([*(reasons or ["GGML_CUDA=ON, but there is no nvcc"]), f"next: {_advice(reasons)}"]))


def _advice(reasons: Sequence[str]) -> str:
    said = "\n".join(reasons)
    if "there is no host compiler" in said:
        return "install it, or name another: CUDAHOSTCXX, CMAKE_CUDA_HOST_COMPILER or --host"
    if "unsupported GNU version" in said or "No supported gcc" in said:
        return "install a g++ that this toolkit takes (g++-11 for CUDA 11.8), and configure again"
    if "cublas_v2.h" in said:
        return "install the headers of this toolkit's cuBLAS (a package named like libcublas-dev), and configure again"
    if ("CUDA 13 dropped" in said and "does not compile" not in said) or not reasons:
        return (
            "install a CUDA toolkit from 11.8 to 12.9 for Pascal (Debian, Ubuntu: nvidia-cuda-toolkit and g++-11); "
            "it is found on PATH, under /usr/local/cuda-*, or where CUDACXX=/path/to/bin/nvcc says"
        )
    return "name a working compiler: CUDACXX=/path/to/bin/nvcc"


def main(arguments: Sequence[str] | None = None) -> int:
    text = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="python vendor/cuda.py", description=__doc__, formatter_class=text)
    parser.add_argument("--arch", default="", help="as CMAKE_CUDA_ARCHITECTURES; default: this machine's cards")
    parser.add_argument("--nvcc", default="", help="try this compiler only")
    parser.add_argument("--host", default="", help="try this host compiler only")
    parser.add_argument("--cmake", action="store_true", help="print NAME=VALUE lines only")
    options = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")  # paths need not be text
    if not options.cmake:
        for nvcc in installed(os.environ):
            print(f"found   {nvcc}: CUDA {version_of(nvcc) or 'unknown'}")
    try:
        chosen = choose(options.arch, options.nvcc, options.host)
    except CudaError as error:
        print(error, file=sys.stderr)
        return 1
    if options.cmake:
        print("\n".join(f"{name}={value}" for name, value in zip(chosen._fields, chosen)))
    else:
        host = chosen.host or "the one that nvcc takes by itself"
        print(
            f"chosen  {chosen.nvcc}: CUDA {chosen.version}, host compiler {host}, tools of {chosen.path or 'its own'}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
