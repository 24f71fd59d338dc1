"""A model that lacks tensors, has one more, or ends after its first layers opens or is refused; no signal ends it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import child
import pytest
from arch_table import ARCHS
from tiny import File

WORKER = """
    import json, sys
    import pyllama_dflash as pd
    outcomes = []
    for path in sys.argv[1:]:
        print(path, file=sys.stderr, flush=True)  # what a signal ends
        try:
            with pd.Speculator(path, n_ctx=64, n_threads=1, n_max=2, n_ubatch=32) as spec:
                spec.run([5, 90, 300, 12], max_tokens=3, ignore_eos=True)
                spec.verify([1, 2])
            outcomes.append("ok")
        except pd.ModelLoadError as error:
            outcomes.append(str(error))
    print(json.dumps(outcomes))
"""
# Optional to the loader and needed by the graph, in each of the operations that ends in.
SOME = ["falcon-h1", "phi3", "hy_v3", "glm-dsa", "qwen3next"]


def kind_of(tensor: str) -> str:
    """Its name without the layer's number."""
    return tensor.split(".", 2)[-1] if tensor.startswith("blk.") else tensor


def without(file: File, kind: str) -> File:
    """The model without its tensors of a kind."""
    return replace(file, tensors={name: values for name, values in file.tensors.items() if kind_of(name) != kind})


def outcomes(folder: Path, files: list[File]) -> list[str]:
    paths = [file.write(folder / f"{i}.gguf") for i, file in enumerate(files)]
    done = child.python(WORKER, *paths, timeout=300)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    said: list[str] = json.loads(done.stdout)
    return said


def check(folder: Path, name: str) -> None:
    """Each kind of tensor is left out, alone."""
    whole = ARCHS[name].file()
    kinds = sorted({kind_of(tensor) for tensor in whole.tensors})
    said = outcomes(folder, [without(whole, kind) for kind in kinds])
    count = Counter(text == "ok" for text in said)
    assert count[False] > count[True]  # a few are optional to the graph, too
    assert all("; convert the file again" in text for text in said if text != "ok"), said


@pytest.mark.parametrize("name", SOME)
def test_tensors_left_out(tmp_path: Path, name: str) -> None:
    check(tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ARCHS.keys() - set(SOME)))
def test_tensors_left_out_of_any_other(tmp_path: Path, name: str) -> None:
    check(tmp_path, name)


def test_a_tensor_that_asks_for_others(tmp_path: Path) -> None:
    """RWKV6's bonus makes the graph of its relative shift by a layer norm that those models lack."""
    file, other = ARCHS["rwkv6qwen2"].file(), ARCHS["rwkv6"].file()
    file.tensors |= {name: values for name, values in other.tensors.items() if "time_mix_first" in name}
    assert "the model has no such tensor" in outcomes(tmp_path, [file])[0]


def test_caches_of_no_layer(tmp_path: Path) -> None:
    """The lightning indexer's, where no layer has one."""
    deepseek4, ratios = ARCHS["deepseek4"], {"a": 0, "c": 128}
    files = []
    for pattern in ("a", "c", "ca", "aaaa"):
        keys: dict[str, Any] = {"attention.compress_ratios": [ratios[kind] for kind in pattern]}
        files.append(replace(deepseek4, pattern=pattern, keys=deepseek4.keys | keys).file())
    *rest, last = outcomes(tmp_path, [*files, ARCHS["dots3note"].first(1)])
    assert rest == ["ok"] * 4
    assert "fails at its first token" in last
