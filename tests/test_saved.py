"""save() and load(): a text goes on where it stood, in another process, or the file is refused with one sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import child
import pytest
from arch_table import ARCHS
from laws import Models
from tiny import Draft, Target

import pyllama_dflash as pd

LONG = "in the end an owl sat " * 8
PAIRS = [
    (Target(), Draft()),
    (Target(), None),
    (Target(weights="Q8_0"), Draft(version=1, window=16)),
    (ARCHS["qwen35"], None),
    (ARCHS["mamba2"], None),
    (ARCHS["gemma3"], None),
]
OPTIONS: list[dict[str, Any]] = [{}, {"type_k": "q8_0", "type_v": "q8_0"}, {"kv_unified": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize("pair", PAIRS, ids=repr)
def test_a_loaded_text_goes_on(models: Models, tmp_path: Path, pair: Any, options: dict[str, Any]) -> None:
    if options.get("type_k") and pair[0] in ARCHS.values():
        pytest.skip("its heads are none of whole blocks")
    file = tmp_path / "text"
    with models.fresh(*pair, **options) as spec:
        said = spec.run(LONG, max_tokens=24, ignore_eos=True)
        spec.save(file)
        longer = [*spec.target.tokenize(LONG), *said.tokens, *spec.target.tokenize(" and so on")]
        cold = spec.run(longer, max_tokens=24, ignore_eos=True)
    with models.fresh(*pair, **options) as spec:
        ids = spec.load(file)
        assert list(ids) == longer[: len(ids)]
        assert len(ids) >= len(longer) - len(spec.target.tokenize(" and so on")) - 1
        warm = spec.run(longer, max_tokens=24, ignore_eos=True)
        assert warm.stats.prompt_n_cached == cold.stats.prompt_n_cached >= len(ids) - 1
        models.assert_same(pair[0], longer, warm.tokens, cold.tokens)
        if pair[1] is not None:
            assert warm.stats.draft_n_accepted > 0
            assert abs(warm.stats.mean_len - cold.stats.mean_len) < 0.2 * cold.stats.mean_len


def test_in_another_process(models: Models, tmp_path: Path) -> None:
    file = tmp_path / "text"
    with models.fresh(Target(), Draft()) as spec:
        said = spec.run(LONG, max_tokens=16, ignore_eos=True).tokens
        spec.save(file)
        wanted = spec.run([*spec.target.tokenize(LONG), *said], max_tokens=16, ignore_eos=True).tokens
    code = """
        import sys
        import pyllama_dflash as pd
        with pd.Speculator(*sys.argv[1:3], n_ctx=300, n_threads=1) as spec:
            spec.load(sys.argv[3])
            ids = [*spec.target.tokenize(sys.argv[4]), *map(int, sys.argv[5].split())]
            result = spec.run(ids, max_tokens=16, ignore_eos=True)
            print(result.stats.prompt_n_cached > 100, result.stats.draft_n_accepted > 0, *result.tokens)
    """
    files = models.files.path(Target()), models.files.path(Draft())
    printed = child.output(code, *files, file, LONG, " ".join(map(str, said))).split()
    assert printed[:2] == ["True", "True"]
    models.assert_same(Target(), LONG, list(map(int, printed[2:])), wanted)


def test_what_does_not_belong_here_is_refused(models: Models, tmp_path: Path) -> None:
    file = tmp_path / "text"
    with models.fresh(Target(), Draft()) as spec:
        with pytest.raises(pd.OrderError, match="no tokens in the cache"):
            spec.save(file)
        spec.run(LONG, max_tokens=8, ignore_eos=True)
        spec.save(file)
        (tmp_path / "other").write_text("mine")
        with pytest.raises(FileExistsError):
            spec.save(tmp_path / "other")
    others = [(dataclasses.replace(Target(), seed=1), Draft()), (Target(), None), (Target(), Draft(version=1))]
    for other in others:
        if other[0].seed:
            other = (other[0], dataclasses.replace(Draft(), seed=1))
        with models.fresh(*other) as spec, pytest.raises(ValueError, match="saved with"):
            spec.load(file)
    with models.fresh(Target(), Draft(), type_k="q8_0") as spec, pytest.raises(ValueError, match="type_k"):
        spec.load(file)
    with models.fresh(Target(), Draft(), n_ctx=64) as spec, pytest.raises(pd.ContextFullError):
        spec.load(file)


def test_a_damaged_file_is_refused(models: Models, tmp_path: Path) -> None:
    file, bad = tmp_path / "text", tmp_path / "bad"
    with models.fresh(Target(), Draft()) as spec:
        wanted = spec.run("the owl", max_tokens=8, ignore_eos=True).tokens
        spec.save(file)
        data = file.read_bytes()
        places = [*range(48), *range(48, len(data), len(data) // 40), len(data) - 1]
        for at in places:
            bad.write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
            with pytest.raises(pd.ModelLoadError):
                spec.load(bad)
        for n in (0, 1, 7, 20, len(data) // 2, len(data) - 1):
            bad.write_bytes(data[:n])
            with pytest.raises(pd.ModelLoadError):
                spec.load(bad)
        with pytest.raises(FileNotFoundError):
            spec.load(tmp_path / "absent")
        assert spec.run("the owl", max_tokens=8, ignore_eos=True).tokens == wanted


def test_a_target_whose_last_weight_differs_is_another(models: Models, tmp_path: Path) -> None:
    file, other = tmp_path / "text", tmp_path / "other.gguf"
    with models.fresh(Target(), Draft()) as spec:
        spec.run(LONG, max_tokens=8, ignore_eos=True)
        spec.save(file)
    raw = bytearray(models.files.path(Target()).read_bytes())
    raw[-1] ^= 1
    other.write_bytes(raw)
    with pd.Speculator(other, models.files.path(Draft()), n_ctx=512, n_threads=1) as spec:
        with pytest.raises(ValueError, match="saved with another target"):
            spec.load(file)
