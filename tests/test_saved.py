"""A text that was saved goes on in another process as if nothing had happened; what does not fit is refused."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import child
import pytest
from arch_table import ARCHS, draft_reading
from laws import TINY, Models
from tiny import Draft, Files, Target

import pyllama_dflash as pd
from pyllama_dflash import _saved

LONG = [(7 * i) % 250 for i in range(500)]
REPLY: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True}
SMALL: dict[str, Any] = {**TINY, "n_ctx": 256, "n_ubatch": 32}
DRAFT = draft_reading(1, 3)
PROMPT = [5, 90, 300, 12, 33, 7, 260, 41, 350, 18, 77, 201, 144, 9, 64, 310, 28, 55, 120, 399, 2]  # beyond the windows
KINDS = [
    "llama",
    "qwen2vl",
    "gemma3",
    "cohere2",
    "gpt-oss",
    "deepseek2",
    "gemma3n",
    "mamba",
    "mamba2",
    "rwkv7",
    "jamba",
]
KINDS += [
    "minimax-m3",
    "dots3note",
    "falcon-h1",
    "qwen35",
    "qwen35moe",
    "qwen4exp",
    "kimi-linear",
    "deepseek4",
    "lfm2",
    "minimax-01",
]
GO_ON = """
    import json, sys
    import pyllama_dflash as pd
    target, draft, path, options, reply = sys.argv[1:]
    with pd.Speculator(target, draft or None, **json.loads(options)) as spec:
        text = spec.load(path)
        before = spec.state
        result = spec.run([*text, 5, 6, 7], **json.loads(reply))
        evaluated = spec.state.n_prefilled - before.n_prefilled
        print(json.dumps([result.tokens, result.stats.to_dict(), evaluated]))
"""


def saved(path: Path, target: Path, draft: Path | None, prompt: list[int], **options: Any) -> tuple[int, ...]:
    """Save what a run leaves; returns the reply that follows without the round trip."""
    with pd.Speculator(target, draft, **options) as spec:
        first = spec.run(prompt, max_tokens=20, ignore_eos=True)
        spec.save(path)
        return spec.run([*prompt, *first.tokens, 5, 6, 7], **REPLY).tokens


# the round trip -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False], ids=["our graph", "llama.cpp's"])
@pytest.mark.parametrize("draft", [Draft(), Draft(version=1), Draft(own=True, window=16, block=16), None], ids=repr)
def test_a_new_process_goes_on(alone: Path, files: Files, draft: Draft | None, fused: bool) -> None:
    """S15: the same ids as without the round trip, the prompt is not evaluated again, and drafts are still accepted."""
    target, other = files.path(Target(weights="Q8_0")), None if draft is None else files.path(draft)
    options = {"n_ctx": 1024, "n_threads": 1, "n_ubatch": 32, **({} if other is None else {"fused_draft": fused})}
    expected = saved(alone / "text", target, other, LONG, **options)
    args = target, other or "", alone / "text", json.dumps({**options, "n_ctx": 768}), json.dumps(REPLY)
    tokens, stats, evaluated = json.loads(child.output(GO_ON, *args))
    assert tuple(tokens) == expected
    assert (stats["prompt_n"], stats["prompt_n_cached"], evaluated) == (4, 519, 3)
    assert draft is None or stats["draft_n_accepted"] > 10


@pytest.mark.parametrize("kinds", [("q8_0", "q8_0"), ("f32", "bf16")], ids=repr)
@pytest.mark.parametrize("fused", [True, False], ids=["our graph", "llama.cpp's"])
def test_types_of_caches(alone: Path, files: Files, kinds: tuple[str, str], fused: bool) -> None:
    options = {**TINY, "n_ctx": 1024, "n_ubatch": 32, "fused_draft": fused, "flash_attn": True}
    names = ("type_k", "type_v", "type_k_draft", "type_v_draft")
    options |= dict(zip(names, (*kinds, *kinds)))
    target, draft = files.pair(Target(weights="Q8_0"))
    expected = saved(alone / "text", target, draft, LONG, **options)
    with pd.Speculator(target, draft, **options) as spec:
        assert spec.run([*spec.load(alone / "text"), 5, 6, 7], **REPLY).tokens == expected
    for name in names:
        with pd.Speculator(target, draft, **{**options, name: "f16"}) as spec:
            with pytest.raises(
                ValueError, match=f"was saved with {name}='{options[name]}', this is {name}='f16': open with that"
            ):
                spec.load(alone / "text")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("with_draft", [True, False], ids=["draft", "no draft"])
def test_every_kind_of_memory(alone: Path, files: Files, name: str, with_draft: bool) -> None:
    """S9: the recurrent state is part of it, and stands where the text ends: rows rejected just before are not."""
    arch = ARCHS[name]
    if with_draft and arch.shown == "none":
        pytest.skip("no draft can read it")
    draft = files.path(DRAFT) if with_draft else None
    options = SMALL if with_draft else {**SMALL, "n_max": 4}
    with pd.Speculator(files.path(arch), draft, **options) as spec:
        first = spec.run(PROMPT, max_tokens=10, ignore_eos=True)
        verdict = spec.verify([(first.tokens[-1] + i) % 400 for i in (3, 1, 4)])
        spec.save(alone / "text")
        text = [*PROMPT, *first.tokens, *verdict.accepted, verdict.bonus]
        expected = [spec.verify([]).bonus for _ in range(12)]
    with pd.Speculator(files.path(arch), draft, **{**options, "n_ctx": 320}) as spec:
        spec.run(LONG[:90], max_tokens=5)
        for _ in range(2):
            assert list(spec.load(alone / "text")) == text
            assert [spec.verify([]).bonus for _ in range(12)] == expected
        before = spec.state
        result = spec.run([*text, *expected], **{**REPLY, "max_tokens": 8})
        assert spec.state.n_prefilled == before.n_prefilled
        assert result.stats.prompt_n_cached == len(text) + 11


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen35", "mamba2"])
@pytest.mark.parametrize("unified", [(True, True), (True, False), (False, True)], ids=repr)
def test_one_buffer_for_all_sequences_or_one_each(
    alone: Path, files: Files, name: str, unified: tuple[bool, bool]
) -> None:
    target, draft = files.path(ARCHS[name]), files.path(DRAFT)
    expected = saved(alone / "text", target, draft, PROMPT, **SMALL, kv_unified=unified[0])
    with pd.Speculator(target, draft, **SMALL, kv_unified=unified[1]) as spec:
        assert spec.run([*spec.load(alone / "text"), 5, 6, 7], **REPLY).tokens == expected


@pytest.mark.parametrize("fused", [True, False], ids=["our graph", "llama.cpp's"])
@pytest.mark.parametrize("windows", [(64, 64), (64, 100), (100, 64), (64, 0), (0, 64)], ids=repr)
def test_a_draft_that_sees_few_positions(alone: Path, files: Files, windows: tuple[int, int], fused: bool) -> None:
    """What a wider window would see beyond those that were saved is not made up; a refusal leaves the object good."""
    target, draft = files.path(Target(weights="Q8_0")), files.path(Draft())
    options = {"n_ctx": 1024, "n_threads": 1, "n_ubatch": 32, "fused_draft": fused}
    expected = saved(alone / "text", target, draft, LONG, **options, n_ctx_draft=windows[0])
    with pd.Speculator(target, draft, **options, n_ctx_draft=windows[1]) as spec:
        if windows == (64, 0) or (windows == (0, 64) and not fused):
            fix = r"n_ctx_draft=\d+, or evaluate .*" if windows == (64, 0) else ""
            with pytest.raises(
                ValueError, match=rf"the state does not fit: the draft's .*{fix} open with the options that"
            ):
                spec.load(alone / "text")
            text = [*LONG, *spec.run(LONG, max_tokens=20, ignore_eos=True).tokens]
        else:
            text = list(spec.load(alone / "text"))
        result = spec.run([*text, 5, 6, 7], **REPLY)
        assert result.stats.prompt_n_cached == 519
        assert result.tokens == expected
        assert result.stats.draft_n_accepted > 20


def test_save_changes_nothing(alone: Path, models: Models) -> None:
    with models.fresh(Target(), Draft()) as spec, models.fresh(Target(), Draft()) as other:
        for each in (spec, other):
            each.run(LONG[:50], max_tokens=9, ignore_eos=True)
        before = spec.state
        spec.save(alone / "text")
        spec.save(alone / "text")  # over its own
        assert (spec.state.n_past, spec.state.anchor) == (before.n_past, before.anchor)
        for _ in range(3):
            drafts = [each.draft() for each in (spec, other)]
            assert drafts[0].tokens == drafts[1].tokens
            verdicts = [each.verify(draft) for each, draft in zip((spec, other), drafts)]
            assert verdicts[0].chosen == verdicts[1].chosen


def test_a_prompt_that_was_not_evaluated_to_its_end(alone: Path, models: Models) -> None:
    def stop(done: int, total: int) -> None:
        raise InterruptedError

    with models.fresh(Target(), Draft(), n_ubatch=32) as spec:
        with pytest.raises(InterruptedError):
            spec.prefill(LONG[:100], on_progress=stop)
        spec.save(alone / "text")
    with models.fresh(Target(), Draft()) as spec:
        assert spec.load(alone / "text") == tuple(LONG[:32])
        assert (spec.state.n_past, spec.state.anchor) == (32, None)
        with pytest.raises(pd.OrderError, match="needs a prompt"):
            spec.draft()
        assert spec.run(LONG[:100], max_tokens=4).stats.prompt_n_cached == 32


def test_its_size_is_that_of_the_text(alone: Path, models: Models) -> None:
    with models.fresh(Target(), Draft()) as spec:
        sizes = []
        for n in (101, 201):
            spec.prefill(LONG[:n])
            spec.save(alone / "text")
            sizes.append((alone / "text").stat().st_size)
    assert sizes[1] < 2 * sizes[0]
    assert sizes[1] - sizes[0] > 100 * 2 * 2 * 32


# what is refused ------------------------------------------------------------------------------------------------------


def test_nothing_to_save(alone: Path, models: Models) -> None:
    spec = models.get(Target(), Draft())
    with pytest.raises(pd.OrderError, match="no tokens in the cache"):
        spec.save(alone / "text")
    assert not list(alone.iterdir())


def test_places(alone: Path, models: Models) -> None:
    with models.fresh(Target(), Draft()) as spec:
        spec.prefill(LONG[:50])
        before = spec.state
        (alone / "mine").write_text("something else")
        for path in (alone / "mine", spec.target.path):
            with pytest.raises(FileExistsError, match="none that save"):
                spec.save(path)
        assert (alone / "mine").read_text() == "something else"
        with pytest.raises(IsADirectoryError):
            spec.save(alone)
        with pytest.raises(FileNotFoundError, match="no folder"):
            spec.save(alone / "a" / "b")
        with pytest.raises(FileNotFoundError):
            spec.load(alone / "absent")
        for path in (alone / "mine", spec.target.path, "/dev/zero", alone):
            with pytest.raises(pd.ModelLoadError, match=r"none that save|no file"):
                spec.load(path)
        for wrong in (5, None):
            with pytest.raises(TypeError):
                spec.save(wrong)  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                spec.load(wrong)  # type: ignore[arg-type]
        assert spec.state == before
        spec.close()
        for call in (spec.save, spec.load):
            with pytest.raises(pd.ClosedError):
                call(alone / "text")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o400])
def test_permissions_stay(alone: Path, models: Models, mode: int) -> None:
    """A conversation that its owner has closed to others is not opened by the next save()."""
    spec = models.get(Target(), Draft())
    spec.prefill(LONG[:9])
    spec.save(alone / "text")
    (alone / "text").chmod(mode)
    spec.save(alone / "text")
    assert (alone / "text").stat().st_mode & 0o777 == mode


def test_ctrl_c_at_the_end_of_save(alone: Path, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written aside goes away all the same."""
    spec = models.get(Target(), Draft())
    spec.prefill(LONG[:9])
    remove = shutil.rmtree

    def interrupted(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(shutil, "rmtree", remove)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        spec.save(alone / "text")
    assert spec.load(alone / "text") == tuple(LONG[:9])


def test_a_text_that_is_longer_than_the_context(alone: Path, files: Files) -> None:
    target, draft = files.pair()
    with pd.Speculator(target, draft, **{**SMALL, "n_ctx": 200}) as spec:
        spec.run(LONG[:199], max_tokens=99, ignore_eos=True)
        assert spec.state.n_past == 200
        spec.save(alone / "text")
    with pd.Speculator(target, draft, **{**SMALL, "n_ctx": 199}) as spec:
        with pytest.raises(pd.ContextFullError, match="has 200 tokens, n_ctx=199; open with a larger"):
            spec.load(alone / "text")
    with pd.Speculator(target, draft, **{**SMALL, "n_ctx": 200}) as spec:
        spec.load(alone / "text")
        with pytest.raises(pd.ContextFullError):
            spec.verify([])


# damage ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, files: Files) -> Path:
    """A file of save() for the pair of the tests."""
    path = tmp_path_factory.mktemp("saved") / "text"
    saved(path, *files.pair(), LONG[:30], **SMALL)
    return path


def test_damage_is_noticed(alone: Path, models: Models, whole: Path) -> None:
    raw = whole.read_bytes()
    spots = [*range(600), *range(600, len(raw), 997), *range(len(raw) - 40, len(raw))]
    damaged: Iterator[bytes] = (raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :] for at in spots)
    cut = (raw[:n] for n in [*range(100), *range(100, len(raw), 997), len(raw) - 1])
    spec = models.get(Target(), Draft(), **SMALL)
    spec.prefill(LONG[:9])
    before = spec.state
    for bad in (*damaged, *cut, raw + b"\0", b""):
        (alone / "bad").write_bytes(bad)
        with pytest.raises(pd.ModelLoadError, match=r"none that save|damaged or cut short|has version"):
            spec.load(alone / "bad")
    assert spec.state == before


def test_facts_with_a_right_checksum(alone: Path, models: Models, whole: Path) -> None:
    """What the JSON part may say, if someone means ill."""
    facts, data = _saved.read(whole)
    spec = models.get(Target(), Draft(), **SMALL)
    for name in facts:
        for value in (None, -1, 2**70, "x", [], {}, True, 1e300):
            if value == facts[name]:
                continue
            _saved.write(alone / "bad", {**facts, name: value}, data)
            if name == "n_tokens" and isinstance(value, int) and value < 256:
                assert len(spec.load(alone / "bad")) == 50  # it only spares the trouble
                continue
            with pytest.raises((ValueError, pd.ModelLoadError, pd.ContextFullError)):
                spec.load(alone / "bad")
    head = whole.read_bytes()[: len(_saved.MAGIC)]
    for text in (b"", b"[]", b"{}", b"\xff", b"[" * 100000, b'{"n_tokens": 1}', b"nul"):
        for n in (len(text), 0, 2**32 - 1):
            content = head + struct.pack("<II", _saved.VERSION, n) + text + data.tobytes()
            (alone / "bad").write_bytes(content + blake2b(content, digest_size=32).digest())
            with pytest.raises((ValueError, pd.ModelLoadError)):
                spec.load(alone / "bad")


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama llama.cpp's", "gemma3", "qwen2vl", "qwen35", "jamba", "mamba2"),
        *("deepseek4", "deepseek32", "dots3note", "qwen4exp", "minimax-m3"),
    ],
)
def test_native_checks(files: Files, name: str) -> None:
    """States with a right checksum and wrong contents: an error that leaves nothing, or a text; never a signal."""
    arch = ARCHS[name.split()[0]]
    draft = files.path(DRAFT) if arch.shown != "none" else ""
    worker = Path(__file__).with_name("state_worker.py").read_text(encoding="utf-8")
    out = json.loads(child.output(worker, files.path(arch), draft, int("llama.cpp's" in name), timeout=300))
    assert out["ValueError"] > 300
    assert out["ModelLoadError"] > 200
    assert set(out) <= {"ok", "ValueError", "ModelLoadError", "ContextFullError", "DecodeError after"}
