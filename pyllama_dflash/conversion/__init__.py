"""Turn draft checkpoints in Hugging Face's layout into GGUF files."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Callable, Union

from .._files import DISTRIBUTION
from ..errors import DFlashError

if TYPE_CHECKING:
    from ..model import ModelInfo

__all__ = ["OUTTYPES", "convert"]

PathLike = Union[str, "os.PathLike[str]"]
OUTTYPES = ("auto", "f32", "f16", "bf16", "q8_0")


def convert(
    source: PathLike,
    out: PathLike,
    *,
    target: PathLike,
    outtype: str = "auto",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ModelInfo:
    """Convert a DFlash or DFlash2 draft to a GGUF file that opens with its target.

    Reads z-lab's checkpoints and those of the speculators library: a config.json beside safetensors, in one file or
    several with an index. The tokenizer is the target's. Tensors are read and written one by one. The file appears in
    its place when it is whole and has passed the checks of opening; where anything fails, nothing is left.

    Args:
        source: the checkpoint's folder.
        out: the file to write.
        target: GGUF file of the model that the draft was trained for.
        outtype: type of the matrices: f32, f16, bf16, q8_0 or auto, the 16-bit type that the checkpoint has, f16 if it
            has none. Norms and the bases of convolutions are F32; with q8_0, rows that are no multiple of 32 are F16.
        overwrite: replace the file if it is there.
        progress: called in this thread with the number of weights done and of all, after each tensor.

    Returns:
        What the new file is.

    Raises:
        ValueError: a bad argument, as an `out` that is the target or a part of the checkpoint.
        OSError: `out` is there already, or cannot be written.
        ModelLoadError: the checkpoint or the target is damaged, incomplete or of a kind that is not supported.
        IncompatibleModelsError: the draft was trained for another target.
        DFlashError: the extra `convert` is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise DFlashError(f"convert needs the gguf package; run: pip install '{DISTRIBUTION}[convert]'")
    from ._run import run  # imports what only a conversion needs

    return run(source, out, target, outtype, overwrite, progress)
