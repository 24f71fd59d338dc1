"""A wrong argument raises an error that names it, and the object stays as usable as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from tiny import N_VOCAB, Files

import pyllama_dflash as pd

Speculator: Any = pd.Speculator
Model: Any = pd.Model
NAN, INF = float("nan"), float("inf")
LONE = "a\ud800b"
ERRORS = (TypeError, ValueError, pd.DFlashError)
NOT_INTS = [1.5, "1", b"1", True, [], NAN]
NOT_FLOATS = ["1", b"1", True, [1.0], 1j]


class Scene:
    """An open Speculator with something cached, and what it says."""

    def __init__(self, pair: tuple[Path, Path]) -> None:
        self.paths = pair
        self.spec: Any = pd.Speculator(*pair, n_ctx=64, n_threads=1)  # Any: what it is given is of the wrong type
        self.model: Any = self.spec.target
        self.said = self.say()

    def say(self) -> tuple[int, ...]:
        tokens: tuple[int, ...] = self.spec.run("the", max_tokens=6, ignore_eos=True).tokens
        return tokens

    def close(self) -> None:
        self.spec.close()


@pytest.fixture(scope="module")
def scene(files: Files) -> Iterator[Scene]:
    with closing(Scene(files.pair())) as scene:
        yield scene


def short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) < 30 else f"{text[:20]}...({len(text)})"


def table(options: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(n, v, id=f"{n}={short(v)}") for n, values in options.items() for v in values]


def check(scene: Scene, call: Callable[[], Any], *named: str) -> None:
    with pytest.raises(ERRORS) as caught:
        call()
    assert any(name in str(caught.value) for name in named), f"{caught.value!r} names none of {named}"
    assert scene.say() == scene.said


# options --------------------------------------------------------------------------------------------------------------

OPENED_WITH: dict[str, list[Any]] = {
    "n_ctx": [-1, 2**31 - 1, 2**31, 2**70, None, *NOT_INTS],
    "n_ubatch": [0, -1, 2**31 - 1, 2**31, None, *NOT_INTS],
    "n_threads": [0, -1, 513, 2**31 - 1, 2**31, *NOT_INTS],
    "n_gpu_layers": [-2, 2**31, None, *NOT_INTS],
    "n_gpu_layers_draft": [-2, 2**31, None, *NOT_INTS],
    "devices": [
        "",
        "GPU",
        "cpu",
        "CUDA99",
        [],
        (),
        ["CPU", "CPU"],
        ["CPU", ""],
        b"CPU",
        [b"CPU"],
        [None],
        0,
        True,
        LONE,
    ],
    "devices_draft": ["", "CUDA99", [], ["CPU", "CPU"], b"CPU", [1], 0],
    "split_mode": ["", "Layer", "row", "tensor", "rows", None, 1, b"layer", True],
    "n_ctx_draft": [-1, 2**31, None, *NOT_INTS],
    "main_gpu": [-1, 1, 64, 2**31, None, *NOT_INTS],
    "tensor_split": [(), [0], [0, 0], [-1], [1, -1], [NAN], [INF], [1e308, 1e308], [1] * 17, [10**400], "1", b"1", 1],
    "use_mmap": [0, 1, None, "true"],
    "use_mlock": [0, 1, None, "true"],
    "kv_unified": [0, 1, None, "true"],
    "cuda_graphs": ["yes", "ON", "", 1, None, b"on", NAN],
    "flash_attn": ["yes", "ON", "", 1, None, b"on", NAN],
    "type_k": ["f17", "", "q8_1", "i8", "q2_K", "f16\0", LONE, None, 1, b"f16"],
    "type_v_draft": ["f17", "F16", None, True],
    "n_max": [-1, 8, 2**31 - 1, 2**70, *NOT_INTS],
    "n_min": [-1, 8, 2**31, None, *NOT_INTS],
    "margin": [-1, -0.001, NAN, INF, -INF, 10**400, None, *NOT_FLOATS],
    "p_min": [-0.1, 1.001, 2, NAN, INF, 10**400, None, *NOT_FLOATS],
    "backend_argmax": [0, 1, None, "true"],
    "fused_draft": [0, 1, None, "true"],
    "draft_vocab": [0, 1, None, "true"],
}
GIVEN_TO_A_CALL: dict[str, list[Any]] = {
    "max_tokens": [-1, 2**31, 2**70, None, *NOT_INTS],
    "stop": ["", [""], ["a", ""], b"a", [b"a"], 5, [5], [None], [["a"]], NAN],
    "ignore_eos": [0, 1, None, "no"],
    "speculate": [0, 1, None, "no"],
    "n_max": [-1, 8, 2**31, *NOT_INTS],
    "n_min": [-1, 8, 2**31, *NOT_INTS],
    "margin": [-1, NAN, INF, 10**400, *NOT_FLOATS],
    "p_min": [-0.1, 1.001, NAN, 10**400, *NOT_FLOATS],
}
OF_A_DRAFT = {name: GIVEN_TO_A_CALL[name] for name in ("n_max", "n_min", "margin", "p_min")}


OF_A_MODEL = {
    name: OPENED_WITH[name]
    for name in ("n_gpu_layers", "devices", "split_mode", "main_gpu", "tensor_split", "use_mmap", "use_mlock")
}
CPU_ONLY = not any(device.is_gpu for device in pd.devices())


@pytest.mark.parametrize(("name", "value"), table(OPENED_WITH))
def test_option_of_speculator(scene: Scene, name: str, value: Any) -> None:
    if name in ("split_mode", "main_gpu", "tensor_split") and not CPU_ONLY:
        pytest.skip("what is out of range depends on the GPUs")
    named = (f"{name}=", f"{name}[", f"{name} ")
    if name.startswith("devices"):
        named += ("CPU is",)  # named twice, or beside another
    check(scene, lambda: pd.Speculator(*scene.paths, **{name: value}), *named)
    if name in OF_A_MODEL:
        check(scene, lambda: pd.Model(scene.paths[0], **{name: value}), *named)


@pytest.mark.parametrize(("name", "value"), table(GIVEN_TO_A_CALL))
def test_option_of_run_and_stream(scene: Scene, name: str, value: Any) -> None:
    check(scene, lambda: scene.spec.run("the", **{name: value}), f"{name}=", "stop=")
    check(scene, lambda: scene.spec.stream("the", **{name: value}), f"{name}=", "stop=")  # before the first chunk


@pytest.mark.parametrize(("name", "value"), table(OF_A_DRAFT))
def test_option_of_draft(scene: Scene, name: str, value: Any) -> None:
    check(scene, lambda: scene.spec.draft(**{name: value}), f"{name}=")


@pytest.mark.parametrize("name", ["n_max", "n_min", "margin", "p_min"])
def test_draft_option_without_a_draft(scene: Scene, name: str) -> None:
    with Speculator(scene.paths[0], n_ctx=64, n_threads=1) as plain:
        check(scene, lambda: plain.run("the", **{name: 1}), f"{name}=1")
        check(scene, lambda: plain.draft(**{name: 1}), f"{name}=1")


# prompts and paths ----------------------------------------------------------------------------------------------------

TOKENS: dict[str, Any] = {
    "bytes": b"the",
    "bytearray": bytearray(b"the"),
    "int": 5,
    "object": object(),
    "set": {1, 2},
    "dict": {1: 2},
    "generator": (n for n in (1, 2)),
    "none-inside": [1, None],
    "floats": [1.0, 2.0],
    "nan": [NAN],
    "bools": [True, False],
    "texts": ["1"],
    "nested": [[1, 2]],
    "ragged": [[1], [2, 3]],
    "matrix": np.ones((2, 2), np.int32),
    "scalar": np.int32(5),
    "float-array": np.ones(3),
    "negative": [1, -1],
    "beyond": [N_VOCAB],
    "2^31": [2**31],
    "2^32": [2**32],  # 0 in 32 bits
    "2^63": [2**63],
    "2^64": [2**64],
    "2^200": [2**200],
    "-2^63": [-(2**63)],
}
PROMPTS: dict[str, Any] = {
    **TOKENS,
    "empty": "",
    "no-ids": [],
    "lone-surrogate": LONE,
    "long-text": "the owl " * 100_000,
    "long-ids": [1] * 65,
    "huge-array": np.zeros(10_000_000, np.int64),
}
NAMED = ("token", "prompt", "surrogate")


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompt(scene: Scene, kind: str) -> None:
    check(scene, lambda: scene.spec.run(PROMPTS[kind]), *NAMED)
    check(scene, lambda: scene.spec.stream(PROMPTS[kind]), *NAMED)
    check(scene, lambda: scene.spec.prefill(PROMPTS[kind]), *NAMED)


@pytest.mark.parametrize("kind", [*TOKENS, "wide"])
def test_tokens_to_verify(scene: Scene, kind: str) -> None:
    check(scene, lambda: scene.spec.verify({**TOKENS, "wide": [1] * 8}[kind]), *NAMED)


PATHS: dict[str, tuple[Any, str]] = {
    "none": (None, "path=None"),
    "int": (5, "path=5"),
    "bool": (True, "path=True"),
    "float": (0.5, "path=0.5"),
    "list": (["a.gguf"], "path=['a.gguf']"),
    "empty": ("", "path=''"),
    "no-bytes": (b"", "path=b''"),
    "nul": ("a\0.gguf", r"path='a\x00.gguf'"),
    "nul-in-bytes": (b"a\0.gguf", r"path='a\x00.gguf'"),
    "missing": ("no/such.gguf", "no/such.gguf"),
    "directory": (".", "directory"),
    "long": ("x" * 5000, "xxx"),
    "device": ("/dev/null", "/dev/null"),
}


@pytest.mark.parametrize("kind", PATHS)
def test_path(scene: Scene, kind: str) -> None:
    path, named = PATHS[kind]
    check(scene, lambda: pd.Speculator(path), named)
    check(scene, lambda: pd.Model(path), named)
    check(scene, lambda: pd.Model.header(path), named)
    if path is not None:
        check(scene, lambda: pd.Speculator(scene.paths[0], path), named)


def test_lone_surrogate_in_a_path(scene: Scene) -> None:
    """Such as stands for a byte that is not UTF-8 is a path; any other is none."""
    check(scene, lambda: pd.Model("a\udcff.gguf"), "a")
    check(scene, lambda: pd.Model("a\ud800.gguf"), r"\ud800")


# the other calls ------------------------------------------------------------------------------------------------------

CALLS: dict[str, tuple[Callable[[Scene], Any], str]] = {
    "prompt and messages": (lambda s: s.spec.run("a", messages="b"), "not both"),
    "neither": (lambda s: s.spec.run(), "prompt or messages"),
    "unknown option": (lambda s: s.spec.run("a", temperature=1), "temperature"),
    "unknown option of Speculator": (lambda s: Speculator(*s.paths, seed=1), "seed"),
    "options by position": (lambda s: Speculator(*s.paths, 512), "positional"),
    "n_min above n_max": (lambda s: s.spec.run("a", n_min=3, n_max=2), "n_min=3"),
    "kwargs without messages": (lambda s: s.spec.run("a", chat_template_kwargs={"x": 1}), "chat_template_kwargs"),
    "kwargs no mapping": (lambda s: s.spec.run(messages="a", chat_template_kwargs=5), "chat_template_kwargs=5"),
    "kwargs no names": (lambda s: s.spec.run(messages="a", chat_template_kwargs={5: 1}), "strings"),
    "kwargs taken": (lambda s: s.spec.run(messages="a", chat_template_kwargs={"messages": 1}), "messages"),
    "messages int": (lambda s: s.spec.run(messages=5), "messages=5"),
    "messages bytes": (lambda s: s.spec.run(messages=b"a"), "messages[0]"),
    "messages mapping": (lambda s: s.spec.run(messages={"role": "user", "content": "a"}), "messages="),
    "messages empty": (lambda s: s.spec.run(messages=[]), "messages=[]"),
    "messages of ints": (lambda s: s.spec.run(messages=[5]), "messages[0]=5"),
    "messages no role": (lambda s: s.spec.run(messages=[{"content": "a"}]), "'role'"),
    "messages surrogate": (lambda s: s.spec.run(messages=LONE), r"'\ud800'"),
    "messages too long": (lambda s: s.spec.run(messages="the owl " * 1000), "n_ctx=64"),
    "on_progress": (lambda s: s.spec.prefill("the", 5), "on_progress=5"),
    "reset": (lambda s: s.spec.reset(1), "positional"),
    "logits": (lambda s: s.spec.logits(), "backend_argmax=True"),
    "draft by position": (lambda s: s.spec.draft(5), "positional"),
    "draft as target": (lambda s: Speculator(s.paths[1]), "draft"),
    "pair swapped": (lambda s: Speculator(*s.paths[::-1]), "draft"),
    "target as draft": (lambda s: Speculator(s.paths[0], s.paths[0]), "draft"),
    "Speculator as target": (lambda s: Speculator(s.spec), "path=<Speculator"),
    "open model and layers": (lambda s: Speculator(s.model, s.paths[1], n_gpu_layers=1), "n_gpu_layers"),
    "open model and mmap": (lambda s: Speculator(s.model, use_mmap=False), "use_mmap"),
    "open model and device": (lambda s: Speculator(s.model, devices="CPU"), "devices"),
    "open model and split": (lambda s: Speculator(s.model, tensor_split=[1]), "tensor_split"),
    "device of no draft": (lambda s: Speculator(s.paths[0], devices_draft="CPU"), "devices_draft=('CPU',)"),
    "main_gpu in layer mode": (lambda s: Model(s.paths[0], main_gpu=1), "main_gpu=1"),
    "split over one": (lambda s: Model(s.paths[0], tensor_split=[1], split_mode="none"), "tensor_split"),
    "header as target": (lambda s: Speculator(pd.Model.header(s.paths[0])), "header"),
    "layers": (lambda s: Model(s.paths[0], n_gpu_layers=-2), "n_gpu_layers=-2"),
    "layers by position": (lambda s: Model(s.paths[0], 1), "positional"),
    "tokenize int": (lambda s: s.model.tokenize(5), "text=5"),
    "tokenize bytes": (lambda s: s.model.tokenize(b"a"), "text=b'a'"),
    "tokenize surrogate": (lambda s: s.model.tokenize(LONE), r"'\ud800' at index 1"),
    "tokenize on a header": (lambda s: pd.Model.header(s.paths[0]).tokenize("a"), "header"),
    "detokenize int": (lambda s: s.model.detokenize(5), "int"),
    "detokenize beyond": (lambda s: s.model.detokenize([1, N_VOCAB]), f"token={N_VOCAB}"),
    "detokenize text": (lambda s: s.model.detokenize("a"), "token='a'"),
    "piece negative": (lambda s: s.model.piece(-1), "token=-1"),
    "piece beyond": (lambda s: s.model.piece(N_VOCAB, special=True), f"token={N_VOCAB}"),
    "piece bool": (lambda s: s.model.piece(True), "token=True"),
    "is_eog 2^32": (lambda s: s.model.is_eog(2**32), f"token={2**32}"),
    "is_eog float": (lambda s: s.model.is_eog(1.0), "token=1.0"),
    "meta int": (lambda s: s.model.meta(5), "key=5"),
    "check_pair text": (lambda s: s.model.check_pair("a"), "draft='a'"),
    "check_pair itself": (lambda s: s.model.check_pair(s.model), "draft"),
    "template taken": (lambda s: s.model.apply_chat_template("a", eos_token=1), "eos_token"),
}


@pytest.mark.parametrize("name", CALLS)
def test_call(scene: Scene, name: str) -> None:
    call, named = CALLS[name]
    check(scene, lambda: call(scene), named)


def test_key_that_no_file_has(scene: Scene) -> None:
    for key in ("", "x", "\0", "general.name\0", LONE, "k" * 100_000):
        assert scene.model.meta(key) is None


def test_order(scene: Scene) -> None:
    with pd.Speculator(*scene.paths, n_ctx=64, n_threads=1, backend_argmax=False) as spec:
        calls: list[Callable[[], Any]] = [spec.draft, lambda: spec.verify([]), lambda: spec.verify([1, 2]), spec.logits]
        for call in calls:
            with pytest.raises(pd.OrderError, match="prefill"):
                call()
            spec.reset()
            with pytest.raises(pd.OrderError, match="prefill"):
                call()
        spec.prefill("the")
        with pytest.raises(pd.OrderError, match=r"verify\(\) first"):
            spec.logits()
        draft = spec.draft()
        assert spec.draft().tokens == draft.tokens  # drafting changes nothing
        spec.verify(draft)
        with pytest.raises(pd.OrderError, match=f"position {draft.position}"):
            spec.verify(draft)
        spec.reset()
        assert spec.run("the", max_tokens=6, ignore_eos=True).tokens == scene.said


def test_callback_that_fails(scene: Scene) -> None:
    with pd.Speculator(*scene.paths, n_ctx=64, n_threads=1, n_ubatch=4) as spec:
        todos = []

        def fail(done: int, todo: int) -> None:
            todos.append(todo)
            raise KeyError(done)

        for _ in range(3):
            with pytest.raises(KeyError):
                spec.prefill("the owl and the cat sat in the sun", fail)
            with pytest.raises(pd.OrderError):
                spec.draft()
        assert todos[0] - 8 == todos[1] - 4 == todos[2]  # each time the step before it was kept
        assert spec.run("the", max_tokens=6, ignore_eos=True).tokens == scene.said
