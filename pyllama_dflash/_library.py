"""Open the shared library by its own header. The only module that imports cffi; _ffi calls what is opened here."""

from __future__ import annotations

from typing import Any

import cffi

from ._files import PACKAGE, find_library


def _load() -> tuple[Any, Any]:
    ffi: Any = cffi.FFI()  # Any: the cdef's types exist at run time only
    ffi.cdef((PACKAGE / "native" / "pld.h").read_text(encoding="utf-8"))
    path = find_library()
    # NODELETE: handles may still be freed while the interpreter tears down its modules.
    flags = getattr(ffi, "RTLD_NOW", 0) | getattr(ffi, "RTLD_NODELETE", 0)
    try:
        lib = ffi.dlopen(str(path), flags)
    except OSError as error:
        raise ImportError(f"{path} cannot be loaded: {error}") from error
    for name in dir(lib):
        try:
            getattr(lib, name)
        except AttributeError:
            raise ImportError(
                f"{path} has no symbol {name}: it is not this package's library (an ordinary libllama does not serve)"
            ) from None
    _check_abi(ffi, lib, str(path))
    return ffi, lib


def _check_abi(ffi: Any, lib: Any, path: str) -> None:
    fix = "reinstall the package so that both come from one build"
    found, wanted = lib.pld_abi_version(), lib.PLD_ABI_VERSION
    if found != wanted:
        raise ImportError(f"{path} has boundary version {found}, this package needs {wanted}; {fix}")
    for name in ffi.list_types()[0]:
        ctype = ffi.typeof(name)
        if ctype.kind != "struct" or ctype.fields is None:
            continue
        size, expected = lib.pld_struct_size(name.encode()), ffi.sizeof(name)
        if size != expected:
            raise ImportError(
                f"{path} (boundary version {found}): {name} has {size} bytes, this package (version {wanted}) "
                f"expects {expected}; {fix}"
            )


ffi, lib = _load()
