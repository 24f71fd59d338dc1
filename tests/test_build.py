"""CMakeLists.txt refuses what cannot work, and says what to do instead. Configures only; compiles nothing of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")


def configure(folder: Path, *options: str, **environment: str) -> str:
    """Configure into folder, which has to fail; return the message with its line breaks undone."""
    command = ["cmake", "-S", str(ROOT), "-B", str(folder), *options]
    clean = {name: value for name, value in os.environ.items() if name not in ("CUDACXX", "CUDAARCHS", "CMAKE_ARGS")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**clean, **environment})
    assert done.returncode, "configuring should have failed"
    return " ".join(done.stderr.split())


def fake_nvcc(folder: Path, release: str) -> Path:
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
    path.chmod(0o755)
    return path


def test_cuda_13_is_refused_for_pascal(tmp_path: Path) -> None:
    compiler = fake_nvcc(tmp_path, "13.0")
    message = configure(
        tmp_path / "b", "-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90;61", f"-DCMAKE_CUDA_COMPILER={compiler}"
    )
    assert "CUDA 13.0 cannot build sm_61" in message
    assert "next: install a CUDA toolkit from 11.8 to 12.9" in message


def test_cuda_13_is_refused_when_the_environment_names_it(tmp_path: Path) -> None:
    compiler = fake_nvcc(tmp_path, "13.1")
    message = configure(tmp_path / "b", "-DGGML_CUDA=ON", CUDACXX=str(compiler), CUDAARCHS="61")
    assert "CUDA 13.1 cannot build sm_61" in message


def test_older_cuda_passes_the_check(tmp_path: Path) -> None:
    compiler = fake_nvcc(tmp_path, "12.9")
    options = ("-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=61", f"-DCMAKE_CUDA_COMPILER={compiler}")
    # The fake compiles nothing, and the tree named last does not exist: that comes first after the CUDA check.
    message = configure(tmp_path / "b", *options, f"-DPYLLAMA_DFLASH_LLAMA_DIR={tmp_path}/none")
    assert "cannot build sm_" not in message
    assert "is no llama.cpp tree" in message


def test_compiler_that_is_no_nvcc_is_named(tmp_path: Path) -> None:
    message = configure(tmp_path / "b", "-DGGML_CUDA=ON", "-DCMAKE_CUDA_COMPILER=/bin/true")
    assert "/bin/true --version gave no version" in message


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("-DLLAMA_CUBLAS=ON", "use -DGGML_CUDA=ON"),
        ("-DLLAMA_CUDA=ON", "use -DGGML_CUDA=ON"),
        ("-DGGML_CUBLAS=ON", "use -DGGML_CUDA=ON"),
        ("-DLLAMA_NATIVE=OFF", "use -DGGML_NATIVE=OFF"),
        ("-DGGML_CUDA_ARCHITECTURES=61", "use -DCMAKE_CUDA_ARCHITECTURES=61"),
        ("-DGGML_VULKAN=ON", "-DPYLLAMA_DFLASH_LLAMA_DIR"),
        ("-DBUILD_SHARED_LIBS=ON", "leave it out"),
        ("-DPYLLAMA_DFLASH_LLAMA_DIR=/nowhere", "/nowhere is no llama.cpp tree"),
    ],
)
def test_option_that_would_do_nothing_is_refused(tmp_path: Path, option: str, expected: str) -> None:
    assert expected in configure(tmp_path / "b", option)


def test_refused_option_is_forgotten(tmp_path: Path) -> None:
    configure(tmp_path / "b", "-DLLAMA_CUDA=ON")
    message = configure(tmp_path / "b", "-DPYLLAMA_DFLASH_LLAMA_DIR=/nowhere")
    assert "LLAMA_CUDA" not in message


def test_misspelt_option_is_refused(tmp_path: Path) -> None:
    assert "-DGGML_NATVE: there is no such option" in configure(tmp_path / "b", "-DGGML_NATVE=ON")
