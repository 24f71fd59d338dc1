"""Where models lie and how they are loaded: the options say it, the text stays the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import child
import pytest
from laws import Models
from tiny import Draft, Target

import pyllama_dflash as pd

PROMPT = "the quick brown fox"
GPUS = [device.name for device in pd.devices() if device.is_gpu]
cpu_only = pytest.mark.skipif(bool(GPUS), reason="there is a GPU")


@pytest.mark.parametrize(
    "options",
    [
        {"devices": "CPU"},
        {"devices": ["CPU"], "devices_draft": ["CPU"]},
        {"devices_draft": ("CPU",), "fused_draft": False},
        {"split_mode": "none", "main_gpu": 0},
        {"use_mmap": False},
        {"use_mlock": True},
        {"use_mmap": False, "use_mlock": True},
        {"kv_unified": True},
        {"cuda_graphs": "on"},
    ],
    ids=repr,
)
def test_the_text_is_the_same(models: Models, options: dict[str, Any]) -> None:
    wanted = models.get(Target(), Draft(), n_gpu_layers=0).run(PROMPT, max_tokens=24)
    with models.fresh(Target(), Draft(), **options) as spec:
        if any(name.startswith("devices") for name in options):
            assert "CPU" in (spec.target.info.device, spec.draft_model and spec.draft_model.info.device)
        found = spec.run(PROMPT, max_tokens=24)
    if not GPUS:
        assert (found.tokens, found.stats.histogram) == (wanted.tokens, wanted.stats.histogram)
    assert found.stats.draft_n_accepted > 0


def test_a_device_is_named_as_devices_names_it(models: Models) -> None:
    for device in pd.devices():
        with models.fresh(Target(), Draft(), devices=device.name, devices_draft=[device.name]) as spec:
            assert spec.draft_model is not None
            assert spec.target.info.device == spec.draft_model.info.device == device.name
            assert spec.params.devices == (device.name,)
    with pd.Model.header(models.files.path(Target())) as header:
        assert header.info.device is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": "CUDA99"}, "devices='CUDA99' is no device; there are: .*CPU"),
        ({"devices_draft": ["CUDA99"]}, "devices_draft='CUDA99' is no device; there are: .*CPU"),
        ({"devices": []}, r"devices=\[\] names no device; use 'CPU' for no GPU"),
        ({"devices": ["CPU", "CPU"]}, "CPU is"),
        ({"split_mode": "rows"}, "split_mode='rows' is unknown; use none, layer, row, tensor"),
        ({"main_gpu": 99, "split_mode": "none"}, r"main_gpu=99 is out of range, 0 to \d+; the GPUs are: "),
        ({"devices": "CPU", "main_gpu": 1}, "main_gpu=1 is out of range, 0 to 0; the GPUs are: none"),
        ({"devices": "CPU", "split_mode": "tensor"}, "split_mode='tensor' needs a GPU; use 'layer'"),
        ({"devices": "CPU", "split_mode": "row"}, "split_mode='row' needs a GPU; use 'layer'"),
        ({"devices": "CPU", "tensor_split": [1]}, "tensor_split has 1 numbers and there are 0 GPUs to split over"),
        ({"tensor_split": [0, 0.0]}, "adds up to 0.0; use one number for each GPU"),
        ({"tensor_split": [1, float("nan")]}, r"tensor_split\[1\]=nan is out of range; use a finite number >= 0"),
        ({"tensor_split": [-1]}, r"tensor_split\[0\]=-1.0 is out of range"),
        ({"tensor_split": [1] * 17}, "tensor_split has 17 entries; give at most 16"),
    ],
)
def test_what_the_devices_cannot_do_is_refused(pair: tuple[Path, Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pd.Speculator(*pair, n_ctx=64, **options)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="drops a capability of Linux")
def test_a_system_that_refuses_to_lock_memory_is_only_warned_of(pair: tuple[Path, Path]) -> None:
    code = """
        import ctypes, logging, resource, sys
        libc = ctypes.CDLL(None, use_errno=True)
        head, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capget(head, sets) == 0
        sets[0] &= ~(1 << 14)  # CAP_IPC_LOCK: a superuser may lock what it likes
        assert libc.capset(head, sets) == 0
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record)
        logging.getLogger("pyllama_dflash").addHandler(handler)
        import pyllama_dflash as pd
        for use_mmap in (True, False):
            lines.clear()
            with pd.Speculator(*sys.argv[1:], n_ctx=64, n_threads=1, use_mmap=use_mmap, use_mlock=True) as spec:
                print(len(spec.run("the", max_tokens=4, ignore_eos=True).tokens))
            print(any("mlock" in line.getMessage() and line.levelno == logging.WARNING for line in lines))
    """
    assert child.output(code, *pair).split() == ["4", "True"] * 2


@cpu_only
def test_one_gpu_more_than_there_are_is_refused_and_the_first_is_not(pair: tuple[Path, Path]) -> None:
    with pd.Model(pair[0], split_mode="none", main_gpu=0) as model:
        assert model.info.device == "CPU"
    with pytest.raises(ValueError, match="main_gpu=1 is out of range, 0 to 0; the GPUs are: none"):
        pd.Model(pair[0], split_mode="none", main_gpu=1)
