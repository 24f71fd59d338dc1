"""Check that a shared library is the one that this package was made for."""

from __future__ import annotations

from typing import Any

_FIX = "reinstall the package so that both come from one build"


def check_library(ffi: Any, lib: Any, path: str) -> None:
    """Raise ImportError unless a library has all symbols of the cdef, its version, and structs of the same sizes."""
    for name in dir(lib):
        try:
            getattr(lib, name)
        except AttributeError:
            raise ImportError(
                f"{path} has no symbol {name}: it is not this package's library (an ordinary libllama does not serve)"
            ) from None
    found, wanted = lib.pld_abi_version(), lib.PLD_ABI_VERSION
    if found != wanted:
        raise ImportError(f"{path} has boundary version {found}, this package needs {wanted}; {_FIX}")
    for name in ffi.list_types()[0]:
        ctype = ffi.typeof(name)
        if ctype.kind != "struct" or ctype.fields is None:
            continue
        size, expected = lib.pld_struct_size(name.encode()), ffi.sizeof(name)
        if size != expected:
            raise ImportError(
                f"{path} (boundary version {found}): {name} has {size} bytes, this package (version {wanted}) "
                f"expects {expected}; {_FIX}"
            )
