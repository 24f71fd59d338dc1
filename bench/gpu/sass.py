"""The machine code of a library: does each product with quantised weights use DP4A, and what does a traced run reach?

cuobjdump of the toolkit that vendor/cuda.py finds takes the library apart. A trace is a JSON file that
`python -m bench kernels` writes on a GPU machine: mangled kernel -> launches.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..records import Record

ROOT = Path(__file__).resolve().parents[2]
PRODUCTS = ("mul_mat_q", "mul_mat_vec_q", "few_cols")  # of quantised weights, by what their names contain
SHORT = 100  # instructions: no product is that short
FLOATS = ("mul_mat_f", "mul_mat_vec_f", "multiply_tiles", "gemm")  # of F16, BF16 and F32 weights
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)")


class Code(NamedTuple):
    """Instructions of a kernel: all, DP4A (IDP), half-precision arithmetic (HFMA2 and the like), and traps.

    A kernel of a shape that its architecture never launches is no more than a message and a trap.
    """

    total: int
    dp4a: int
    half: int
    traps: int


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser("sass", help="whether a CUDA library's machine code uses DP4A where it multiplies")
    run.add_argument("library", type=Path)
    run.add_argument("--arch", type=int, default=61, help="default %(default)s")
    run.add_argument("--trace", type=Path, nargs="*", default=[], metavar="FILE", help="of bench kernels")
    run.add_argument("--out", type=Path, default=Path("build/bench/sass.jsonl"))


@functools.cache  # to find it, each toolkit compiles a probe
def cuobjdump() -> str:
    sys.path.insert(0, str(ROOT / "vendor"))
    import cuda

    toolkit = cuda.choose("61")
    return str(Path(toolkit.path or toolkit.nvcc.parent) / "cuobjdump")


def extract(library: Path, arch: int, folder: Path) -> list[Path]:
    """Write the library's machine code for an architecture into folder, a file for each source file."""
    command = [cuobjdump(), "--extract-elf", f"sm_{arch}", str(library.resolve())]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"cuobjdump ended with {done.returncode}"
        raise ValueError(f"{library} is no library with CUDA code: {said}")
    return sorted(folder.glob("*.cubin"))


def kernels(cubin: Path) -> dict[str, Code]:
    """Each kernel's instructions."""
    done = subprocess.run([cuobjdump(), "-sass", str(cubin)], capture_output=True, text=True, check=True)
    found: dict[str, Counter[str]] = {}
    now: Counter[str] = Counter()
    for line in done.stdout.splitlines():
        if "Function :" in line:
            now = found.setdefault(line.rpartition(":")[2].strip(), Counter())
        elif match := INSTRUCTION.match(line):
            now[match.group(1)] += 1
    return {name: count(code) for name, code in found.items()}


def count(code: Counter[str]) -> Code:
    half = sum(n for name, n in code.items() if re.fullmatch(r"H(FMA|ADD|MUL|MMA)\d*", name))
    return Code(sum(code.values()) - code["NOP"], code["IDP"] + code["IDP4A"], half, code["BPT"])


def wanted(cubin: Path, names: Sequence[str]) -> bool:
    data = cubin.read_bytes()
    return any(name.encode() in data for name in names)


def measure(library: Path, arch: int, traces: Sequence[Path]) -> Iterator[Record]:
    """Yield a record of the library, then one a kernel: products with quantised weights, and all that a trace holds."""
    launched = Counter[str]()
    for path in traces:
        launched.update(read_trace(path))
    names = sorted({*PRODUCTS, *(name for name in launched if name.startswith("_Z"))})
    with tempfile.TemporaryDirectory() as folder:
        cubins = extract(library, arch, Path(folder))
        yield {"record": "library", "file": library.name, "arch": arch, "n_cubins": len(cubins)}
        with ThreadPoolExecutor(2) as pool:
            for found in pool.map(kernels, [cubin for cubin in cubins if wanted(cubin, names)]):
                for name, code in found.items():
                    if name in launched or is_product(name):
                        base = {"record": "kernel", "name": name, "launches": launched[name]}
                        yield {**base, **code._asdict(), "empty": code.total < SHORT and code.traps > 0}
    for name in launched:
        if not name.startswith("_Z"):
            base = {"record": "kernel", "name": name, "launches": launched[name]}
            yield {**base, **Code(0, 0, 0, 0)._asdict(), "empty": False}


def read_trace(path: Path) -> dict[str, int]:
    with suppress(ValueError):  # and UnicodeDecodeError, which is one
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and all(type(n) is int for n in found.values()):
            return found
    raise ValueError(f"{path} is no trace; give a file that python -m bench kernels --trace wrote")


def is_product(name: str) -> bool:
    # Beside each product there are kernels that prepare or finish it.
    return any(part in name for part in PRODUCTS) and not re.search(r"fixup|quantize|helper", name)


def demangled(names: Sequence[str]) -> dict[str, str]:
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    short = [re.sub(r"\(anonymous namespace\)::|^void |\(.*?\)(?=\d)", "", line) for line in done.stdout.splitlines()]
    return {name: text.partition("(")[0] for name, text in zip(names, short)}


def faults(rows: Sequence[Record]) -> list[str]:
    """What contradicts: no code at all, quantised products without DP4A, float products reached by the traces."""
    found = (
        [] if any(row.get("n_cubins") for row in rows) else ["the library holds no machine code of this architecture"]
    )
    for row in rows:
        if row["record"] != "kernel":
            continue
        if is_product(row["name"]) and not row["dp4a"] and not (row["empty"] and not row["launches"]):
            found.append(f"no DP4A: {row['name']}")
        if row["launches"] and not is_product(row["name"]) and any(part in row["name"] for part in FLOATS):
            found.append(f"a product of floats was reached: {row['name']}")
    return found


def table(rows: Sequence[Record]) -> str:
    """Families of products, then each kernel that was launched."""
    some = [row for row in rows if row["record"] == "kernel"]
    text = demangled([row["name"] for row in some])
    families: dict[str, list[Record]] = {}
    for row in some:
        if is_product(row["name"]):
            families.setdefault(text[row["name"]].partition("<")[0], []).append(row)
    head = f"{'products of quantised weights':32} {'kernels':>8} {'empty':>6} {'with DP4A':>10}"
    lines = [f"{head} {'with half arithmetic':>21}"]
    for name, group in sorted(families.items()):
        n_empty, n_dp4a, n_half = (sum(bool(row[key]) for row in group) for key in ("empty", "dp4a", "half"))
        lines.append(f"{name:32} {len(group):8} {n_empty:6} {n_dp4a:10} {n_half:21}")
    once = {row["name"]: row for row in some if row["launches"]}  # several files may hold a kernel
    reached = sorted(once.values(), key=lambda row: -row["launches"])
    if reached:
        lines += ["", f"{'launches':>8} {'instructions':>12} {'DP4A':>6} {'half':>6}  kernel"]
    for row in reached:
        counts = f"{row['launches']:8} {row['total']:12} {row['dp4a']:6} {row['half']:6}"
        lines.append(f"{counts}  {text[row['name']][:100]}")
    return "\n".join([*lines, "", *(faults(rows) or ["no fault found"])])
