"""The pinned source: the lock, pip's download of the archive, and what we read out of it."""

from __future__ import annotations

import gzip
import hashlib
import io
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK = HERE / "llama.cpp.lock"
COMMAND = "python vendor/vendor.py"

# What the library is built from: folders end in "/", "/*" means the files of a folder but not its subfolders.
# vendor/*/CMakeLists.txt are named by the top CMakeLists.txt; the headers beside them serve tools we do not build.
KEEP: tuple[str, ...] = (
    "CMakeLists.txt",
    "LICENSE",
    "licenses/",
    "cmake/",
    "include/",
    "src/",
    "ggml/CMakeLists.txt",
    "ggml/cmake/",
    "ggml/include/",
    "ggml/src/*",
    "ggml/src/ggml-cpu/",
    "ggml/src/ggml-cuda/",
    "vendor/CMakeLists.txt",
    "vendor/hash/",
    "vendor/miniaudio/CMakeLists.txt",
    "vendor/nlohmann/CMakeLists.txt",
    "vendor/sheredom/CMakeLists.txt",
    "vendor/stb/CMakeLists.txt",
)

Files = dict[str, bytes]


class VendorError(Exception):
    """Something the caller can put right; the message ends with the next command."""


def read_lock() -> dict[str, str]:
    lines = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fetch_sdist(folder: Path) -> Path:
    """Download the pinned source archive into folder with pip's own client, and verify its hash."""
    lock = read_lock()
    package = f"{lock['package']}=={lock['version']}"
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), package]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    found = [path for path in folder.glob("*.tar.gz") if path.name.endswith(f"-{lock['version']}.tar.gz")]
    if done.returncode or not found:
        raise VendorError(
            f"pip could not download {package}:\n{done.stdout}\n"
            f"next: {sys.executable} -m pip install pip scikit-build-core (pip reads the metadata with it)\n"
            f"      then {COMMAND} sync; offline, give the archive: {COMMAND} sync --archive FILE,\n"
            "      or build from a tree you have: -DPYLLAMA_DFLASH_LLAMA_DIR=PATH"
        )
    return verify(found[0])


def verify(archive: Path) -> Path:
    wanted, got = read_lock()["sha256"], sha256(archive.read_bytes())
    if got != wanted:
        raise VendorError(f"{archive}: sha256 is {got}, {LOCK.name} wants {wanted}\nnext: delete it and sync again")
    return archive


def _kept(name: str, keep: Sequence[str]) -> bool:
    for rule in keep:
        if rule.endswith("/*") and name.rpartition("/")[0] == rule[:-2]:
            return True
        if name == rule or (rule.endswith("/") and name.startswith(rule)):
            return True
    return False


def read_archive(archive: Path, root: str, keep: Sequence[str]) -> Files:
    """Read the wanted regular files into memory; links and odd names are never followed, so nothing can escape."""
    files: Files = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name[len(root) + 1 :] if root else member.name
            if not member.isfile() or (root and not member.name.startswith(root + "/")) or not _kept(name, keep):
                continue
            if name.startswith("/") or {"..", ""} & set(name.split("/")) or "\\" in name:
                raise VendorError(f"{archive}: unsafe name {member.name!r}\nnext: check {LOCK.name}")
            stream = tar.extractfile(member)
            files[name] = stream.read() if stream else b""
    if not files:
        raise VendorError(f"{archive}: nothing to keep under {root!r}\nnext: check root in {LOCK.name}")
    return files


def pack(files: Files) -> bytes:
    raw = io.BytesIO()
    with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6, mtime=0) as packed:
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for name in sorted(files):
                info = tarfile.TarInfo(name)
                info.size = len(files[name])
                tar.addfile(info, io.BytesIO(files[name]))
    return raw.getvalue()
