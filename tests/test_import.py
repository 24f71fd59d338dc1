"""A library that does not serve is an ImportError that names the file and what is wrong with it."""

from __future__ import annotations

import ctypes.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import child
import pytest
from tiny import Files

from pyllama_dflash._files import LIBRARY_VARIABLE, PACKAGE, find_library

IMPORT = """
try:
    import pyllama_dflash
except ImportError as error:
    print(error)
else:
    print("imported")
"""


def said_of(library: Path | str) -> str:
    return child.output(IMPORT, env={**os.environ, LIBRARY_VARIABLE: str(library)}).strip()


def compiled(folder: Path, source: str) -> Path:
    """A shared library of some C source."""
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("there is no C compiler")
    (folder / "stub.c").write_text(source)
    library = folder / "libstub.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "stub.c"], check=True, timeout=60)
    return library


def stub(version: str, size: str) -> str:
    """C source of a library that has all symbols, a version and a size for all structs."""
    header = (PACKAGE / "native" / "pld.h").read_text(encoding="utf-8")
    # A declaration stands at the start of a line and is the only thing there that is called pld_*(.
    names = set(re.findall(r"^(?:void|int32_t|int64_t|const char \*) ?(pld_\w+)\(", header, re.MULTILINE))
    assert len(names) > 25
    source = [f"int {name}(void) {{ return 0; }}" for name in sorted(names - {"pld_abi_version", "pld_struct_size"})]
    source.append(f"int pld_abi_version(void) {{ return {version}; }}")
    source.append(f"int pld_struct_size(const char *name) {{ return {size}; }}")
    return "\n".join(source)


def abi_version() -> int:
    found = re.search(r"PLD_ABI_VERSION = (\d+)", (PACKAGE / "native" / "pld.h").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1])


def test_missing_file(tmp_path: Path) -> None:
    said = said_of(tmp_path / "gone.so")
    assert f"{LIBRARY_VARIABLE}={tmp_path / 'gone.so'}" in said
    assert "not a file" in said


def test_directory(tmp_path: Path) -> None:
    assert f"{tmp_path} is not a file" in said_of(tmp_path)


@pytest.mark.parametrize("content", [b"", b"This is not a library.\n", b"\x7fELF"], ids=["empty", "text", "head"])
def test_no_library(tmp_path: Path, content: bytes) -> None:
    library = tmp_path / "text.so"
    library.write_bytes(content)
    said = said_of(library)
    assert said.startswith(f"{library} cannot be loaded: ")


def test_stock_library() -> None:
    path = next((path for path in map(Path, _loaded("libm")) if path.is_file()), None)
    if path is None:
        pytest.skip("no shared library to try is found")
    said = said_of(path)
    assert said.startswith(f"{path} has no symbol pld_")
    assert "not this package's library" in said


def _loaded(name: str) -> list[str]:
    """Paths of the libraries of that name that this process has."""
    ctypes.CDLL(ctypes.util.find_library(name.removeprefix("lib")) or None)
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return [line.split()[-1] for line in lines if f"/{name}" in line]


def test_stub_without_symbols(tmp_path: Path) -> None:
    library = compiled(tmp_path, "int llama_backend_init(void) { return 0; }")
    assert said_of(library).startswith(f"{library} has no symbol pld_")


def test_older_and_newer_boundary(tmp_path: Path) -> None:
    wanted = abi_version()
    for found in (wanted - 1, wanted + 1):
        library = compiled(tmp_path, stub(version=str(found), size="-1"))
        assert said_of(library).startswith(f"{library} has boundary version {found}, this package needs {wanted}; ")


def test_other_struct_sizes(tmp_path: Path) -> None:
    """The same version with other structs, as a build from another state of the tree has them."""
    library = compiled(tmp_path, stub(version=str(abi_version()), size="4"))
    said = said_of(library)
    assert said.startswith(f"{library} (boundary version {abi_version()}): pld_")
    assert re.search(rf"pld_\w+ has 4 bytes, this package \(version {abi_version()}\) expects \d+; ", said)


def test_beside_another_copy(tmp_path: Path, files: Files) -> None:
    """Two copies in a process, as two packages may bring them, do not take each other's symbols."""
    code = """
        import ctypes, sys
        other = ctypes.CDLL(sys.argv[1], mode=int(sys.argv[2]))
        assert other.pld_init() == 0
        import pyllama_dflash as pd
        with pd.Speculator(*sys.argv[3:5], n_ctx=64, n_threads=1) as spec:
            print(*spec.run("the", max_tokens=8, ignore_eos=True).tokens)
        assert other.pld_init() == 0
    """
    copy = tmp_path / "copy.so"
    shutil.copyfile(find_library(), copy)
    local, shared = (
        child.output(code, copy, mode, *files.pair()) for mode in (os.RTLD_NOW, os.RTLD_NOW | os.RTLD_GLOBAL)
    )
    assert local == shared
    assert len(local.split()) == 8


def test_import_is_quiet_and_starts_no_thread() -> None:
    code = """
        import threading, pyllama_dflash
        print(threading.active_count(), sorted(set(pyllama_dflash.__all__) - set(dir(pyllama_dflash))))
    """
    assert child.output(code) == "1 []\n"
