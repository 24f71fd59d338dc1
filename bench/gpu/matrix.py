"""Each library, with CUDA graphs and without: the tests that need a GPU, then rounds. A failure is a record too."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..records import Record
from . import builds, process, suite
from .builds import LIBRARY, Library

NO_GRAPHS = "GGML_CUDA_DISABLE_GRAPHS"  # ggml looks whether it is there, not what it is
GRAPHS = {"on": None, "off": "1"}


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Args:
        folder: for the records of rounds while they run.
        libraries: those brought along.
        arch: compute capability to build one more for; "": none.
        llama_dir: the source to build from; None: the synced tree.
        graphs: of GRAPHS, each a run of everything.
        tests: files or folders with tests marked gpu; none: no tests.
        rounds: arguments of `python -m bench round`; none: no rounds.
        limit_s: for each process; the build has its own.
        build_limit_s: for the build.
    """

    folder: Path
    libraries: Sequence[Library]
    arch: str
    llama_dir: Path | None
    graphs: Sequence[str]
    tests: Sequence[str]
    rounds: Sequence[str]
    limit_s: float
    build_limit_s: float


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "gpu", help="tests and rounds of several libraries on a GPU, with CUDA graphs and without"
    )
    run.add_argument("--out", type=Path, default=Path("build/bench/gpu"), metavar="DIR", help="for the records")
    run.add_argument("--file", default="gpu.jsonl", help="of the records, in DIR (default %(default)s)")
    text = "a library brought along; repeatable"
    run.add_argument("--library", type=Library.parse, action="append", default=[], metavar="NAME=PATH", help=text)
    run.add_argument("--arch", help="build a library for this compute capability; without --library: 90")
    run.add_argument("--llama-dir", type=Path, metavar="DIR", help="source to build from; default: the synced tree")
    run.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS), help="CUDA graphs (default: both)")
    run.add_argument("--tests", nargs="*", default=["tests"], metavar="PATH", help="none: leave them out")
    run.add_argument("--no-rounds", action="store_true", help="tests only")
    run.add_argument("--n-max", type=int, nargs="+", default=[7], metavar="N")
    run.add_argument("--tokens", type=int, default=256, help="to generate for each prompt (default %(default)s)")
    run.add_argument("--prompts", type=int, default=7, metavar="N", help="kinds mixed (default %(default)s)")
    run.add_argument("--repeats", type=int, default=1)
    run.add_argument("--target", type=Path, help="GGUF file; default: the demo pair's")
    run.add_argument("--draft", type=Path)
    run.add_argument("--threads", type=int, help="default: all CPUs of this process")
    run.add_argument("--ctx", type=int, default=2048)
    run.add_argument("--gpu-layers", type=int, default=-1, metavar="N", help="of target and draft; -1: all")
    run.add_argument("--timeout", type=float, default=300, metavar="S", help="for each process (default %(default)s)")
    run.add_argument("--build-timeout", type=float, default=550, metavar="S", help="default %(default)s")


def plan(args: argparse.Namespace) -> Plan:
    rounds = []
    if not args.no_rounds:
        numbers = {"tokens": args.tokens, "prompts": args.prompts, "repeats": args.repeats, "ctx": args.ctx}
        numbers |= {"gpu-layers": args.gpu_layers, "threads": args.threads, "target": args.target, "draft": args.draft}
        rounds = ["--no-upstream", "--no-xllamacpp", "--n-max", *map(str, args.n_max)]
        rounds += [f"--{name}={value}" for name, value in numbers.items() if value is not None]
    arch = args.arch or ("" if args.library else "90")
    limits = (args.timeout, args.build_timeout)
    return Plan(args.out, args.library, arch, args.llama_dir, args.graphs, args.tests, rounds, *limits)


def measure(plan: Plan) -> Iterator[Record]:
    """Yield the build's record, then for each library its provenance and all records of its runs, tagged."""
    libraries = list(plan.libraries)
    if plan.arch:
        built, row = builds.build(plan.arch, plan.llama_dir, plan.build_limit_s)
        yield row
        libraries += [built] if row["record"] != "failed" else []
    for library in libraries:
        row = builds.probe(library, plan.limit_s)
        yield row
        if row["record"] == "failed":
            continue
        for graphs in plan.graphs:
            env = process.environment(**{LIBRARY: str(library.path), NO_GRAPHS: GRAPHS[graphs]})
            for row in one(plan, env):
                yield {**row, "library": library.name, "graphs": graphs}


def one(plan: Plan, env: Mapping[str, str]) -> Iterator[Record]:
    """Yield the records of one library's tests and rounds."""
    if plan.tests:
        yield from suite.run(plan.tests, env, plan.limit_s)
    if plan.rounds:
        part = plan.folder.resolve() / "part.jsonl"
        part.unlink(missing_ok=True)
        command = process.python("-m", "bench", "round", f"--out={part}", *plan.rounds)
        ended = process.run(command, env, plan.limit_s)
        yield from whole_lines(part)
        part.unlink(missing_ok=True)
        if ended.code != 0:
            yield builds.failed("rounds", ended)


def whole_lines(path: Path) -> Iterator[Record]:
    """Yield the records of a file whose writer may have been killed in the middle of its last line."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            return
