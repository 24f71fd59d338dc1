"""Run DFlash and DFlash2 speculative decoding in process.

Example::

    from pyllama_dflash import Speculator

    with Speculator("target.gguf", "draft.gguf") as spec:
        print(spec.run(messages="Write a quicksort."))
"""

from . import _start  # noqa: F401 - first: it loads the library
from .build import Device, build_info, devices, supports_gpu
from .conversion import convert
from .errors import (
    BusyError,
    ClosedError,
    ContextFullError,
    DecodeError,
    DFlashError,
    IncompatibleModelsError,
    ModelLoadError,
    OrderError,
)
from .inspection import Inspection, inspect
from .memory import DeviceMemory, Graph, Memory, MemoryPlan
from .model import Model, ModelInfo
from .models import demo_pair
from .params import GenerateParams, Params
from .quantizing import QuantizedTensor, QuantizeResult, quantize
from .recipes import RECIPES, Recipe
from .result import Chunk, Draft, ManyResult, Result, State, Stats, Verdict
from .speculator import Speculator
from .stream import Stream
from .tensors import TensorGroup

__version__ = build_info().get("version", "unknown")

__all__ = [
    "RECIPES",
    "BusyError",
    "Chunk",
    "ClosedError",
    "ContextFullError",
    "DFlashError",
    "DecodeError",
    "Device",
    "DeviceMemory",
    "Draft",
    "GenerateParams",
    "Graph",
    "IncompatibleModelsError",
    "Inspection",
    "ManyResult",
    "Memory",
    "MemoryPlan",
    "Model",
    "ModelInfo",
    "ModelLoadError",
    "OrderError",
    "Params",
    "QuantizeResult",
    "QuantizedTensor",
    "Recipe",
    "Result",
    "Speculator",
    "State",
    "Stats",
    "Stream",
    "TensorGroup",
    "Verdict",
    "build_info",
    "convert",
    "demo_pair",
    "devices",
    "inspect",
    "quantize",
    "supports_gpu",
]
