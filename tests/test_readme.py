"""The README tells the truth: its code runs, its commands work, its table is that of Params.

Run as a program it writes the options table into the README.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import pyllama_dflash
from pyllama_dflash import Params, Speculator

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
MARKED = re.compile(r"(?<=<!-- options -->\n).*?(?=<!-- /options -->)", re.DOTALL)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def commands(start: str) -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines() if line.startswith(start)]


def options_table() -> str:
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(Params):
        rows.append(f"| `{field.name}` | `{field.default!r}` | {field.metadata['help']} |")
    return "\n".join(rows) + "\n"


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_options_table_is_that_of_params() -> None:
    found = MARKED.search(TEXT)
    assert found is not None
    assert found[0] == options_table(), f"run: python {Path(__file__).name}"


def test_options_are_the_keywords_of_speculator() -> None:
    keywords = [p.name for p in inspect.signature(Speculator).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert keywords == [field.name for field in dataclasses.fields(Params)]


@pytest.mark.model
@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: f"{code.count(chr(10))}-lines")
def test_python_block_runs(
    code: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})  # noqa: S102 - running it is the test
    assert capsys.readouterr().out.strip()


@pytest.mark.model
@pytest.mark.parametrize("line", commands("pyllama-dflash"))
def test_shell_line_of_the_program_runs(line: str, tmp_path: Path) -> None:
    loads = re.search(r"--load (\S+)", line)
    before = [other for other in commands("pyllama-dflash") if loads and f"--save {loads[1]}" in other]
    for each in (*before[:1], line):
        program, *arguments = shlex.split(each)
        assert program == "pyllama-dflash"
        done = run([sys.executable, "-m", "pyllama_dflash", *arguments], tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_program_named_in_the_readme_is_installed() -> None:
    scripts = Path(sys.executable).parent
    if not (scripts / "pyllama-dflash").exists():
        pytest.skip("the package is not installed in this environment")
    done = run([str(scripts / "pyllama-dflash"), "--help"], ROOT)
    assert done.returncode == 0
    assert "run" in done.stdout


@pytest.mark.parametrize("line", commands("python vendor/vendor.py"))
def test_vendor_line_runs(line: str) -> None:
    done = run([sys.executable, *shlex.split(line)[1:]], ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_installing_lines_are_those_that_ci_runs_and_cmake_checks() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    lines = commands("pip install")
    assert any("[demo]" in line for line in lines)
    tests = [line for line in lines if "pytest" in line]
    assert [line for line in tests if line in ci] == tests != []


@pytest.mark.parametrize("line", commands("CMAKE_ARGS="))
def test_cmake_options_named_in_the_readme_exist(line: str, tmp_path: Path) -> None:
    options = shlex.split(shlex.split(line)[0].partition("=")[2])
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.41'\n", encoding="utf-8")
    nvcc.chmod(0o755)
    # The tree named last does not exist: configuring gets past all checks of options and stops there.
    last = [f"-DCMAKE_CUDA_COMPILER={nvcc}", f"-DPYLLAMA_DFLASH_LLAMA_DIR={tmp_path}/none"]
    done = run(["cmake", "-S", str(ROOT), "-B", str(tmp_path / "b"), *options, *last], tmp_path)
    assert "is no llama.cpp tree" in " ".join(done.stderr.split())


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w./]+\.(?:py|cpp|h|lock|jsonl|md))`", TEXT))))
def test_file_named_in_the_readme_exists(name: str) -> None:
    assert any((ROOT / folder / name).exists() for folder in ("", "pyllama_dflash"))


def test_public_names_are_documented() -> None:
    for name in pyllama_dflash.__all__:
        assert inspect.getdoc(getattr(pyllama_dflash, name)), name


if __name__ == "__main__":
    README.write_text(MARKED.sub(lambda _: options_table(), TEXT), encoding="utf-8")
    print(f"wrote {os.path.relpath(README)}")
