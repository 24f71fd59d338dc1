"""Call each C function with what it must refuse; run in a process of its own, with a target and a draft as arguments.

Each line of output is JSON: what is called next, or what was called, and the status. The last line is "done".
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

import cffi

from pyllama_dflash._files import PACKAGE, find_library

ffi: Any = cffi.FFI()
ffi.cdef((PACKAGE / "native" / "pld.h").read_text(encoding="utf-8"))
lib: Any = ffi.dlopen(str(find_library()))
INT_MIN, INT_MAX, NAN, INF = -(2**31), 2**31 - 1, float("nan"), float("inf")
INTS, FLOATS = [INT_MIN, -2, -1, 0, 1, INT_MAX], [-1.0, NAN, INF, -INF, 3e38]
N_CTX, N_MAX = 64, 7
COUNTS = {"devices": "n_devices", "tensor_split": "n_split"}  # of the entries of an array
# arguments that say how large a buffer is
SIZES = {("pld_log_next", 3), ("pld_model_meta_key", 3), ("pld_model_meta", 3), ("pld_model_token", 3)}
SIZES |= {("pld_model_tokenize", 2), ("pld_model_tokenize", 6), ("pld_model_piece", 4), ("pld_engine_graphs", 2)}
SIZES |= {("pld_engine_devices", 2), ("pld_plan", 7), ("pld_model_tensors", 2), ("pld_model_mismatch", 4)}
SIZES |= {
    ("pld_quantize_header", 6),
    ("pld_engine_tokens", 3),
    ("pld_engine_state_get", 3),
    ("pld_engine_state_set", 3),
}
ENGINE = {"n_ctx": N_CTX, "n_ubatch": 8, "n_threads": 1, "n_max": -1, "flash_attn": -1, "backend_argmax": 0}
ENGINE |= {"fused_draft": 1, "draft_vocab": 1, "n_seq_max": 1}
KV = {name: lib.pld_kv_type(b"f16") for name in ("type_k", "type_v", "type_k_draft", "type_v_draft")}


def call(label: str, name: str, *args: Any) -> int:
    print(json.dumps([label]), flush=True)
    result = getattr(lib, name)(*args)
    if isinstance(result, ffi.CData):
        result = 0 if result != ffi.NULL else -1
    print(json.dumps([label, result]), flush=True)
    return int(result or 0)


class Stage:
    """An open pair, an engine on it, and buffers."""

    def __init__(self, target: str, draft: str) -> None:
        self.path, self.draft_path = target.encode(), draft.encode()
        self.keep: list[Any] = []
        self.target, self.draft = self.model(target), self.model(draft)
        self.header = self.model(target, header_only=1), self.model(draft, header_only=1)
        self.n_tensors = lib.pld_model_tensors(self.target, ffi.NULL, 0)
        self.engine = self.open(ENGINE | KV)
        self.state = self.new("uint8_t[]", 1)
        self.say()
        self.state = self.new("uint8_t[]", lib.pld_engine_state_size(self.engine, 0))
        assert lib.pld_engine_state_get(self.engine, 0, self.state, len(self.state)) == 0

    def new(self, kind: str, value: Any = None) -> Any:
        self.keep.append(ffi.new(kind, value))
        return self.keep[-1]

    def model(self, path: str, header_only: int = 0) -> Any:
        out = self.new("pld_model **")
        params = self.new("pld_model_params *", {"n_gpu_layers": 0, "header_only": header_only})
        assert lib.pld_model_open(path.encode(), params, out) == 0, ffi.string(lib.pld_last_error())
        return out[0]

    def open(self, params: dict[str, int]) -> Any:
        out = self.new("pld_engine **")
        status = lib.pld_engine_open(self.target, self.draft, self.new("pld_engine_params *", params), out)
        assert status == 0, ffi.string(lib.pld_last_error())
        return out[0]

    def say(self) -> list[int]:
        """Two rounds, from a prompt on."""
        n, said = self.new("int32_t *"), []
        assert lib.pld_engine_begin(self.engine, 0, self.new("int32_t[]", list(range(40, 60))), 20, n) == 0
        while lib.pld_engine_prefill(self.engine, 0) > 0:
            pass
        for _ in range(2):
            args = self.valid()["pld_engine_draft"]
            assert lib.pld_engine_draft(*args) == 0, ffi.string(lib.pld_last_error())
            verdict, verify = self.new("pld_verdict *"), self.new("pld_verify_request *", (0, N_MAX))
            assert lib.pld_engine_verify(self.engine, verify, 1, args[4], ffi.NULL, ffi.NULL, verdict, ffi.NULL) == 0
            said += [verdict.n_accepted, verdict.bonus]
        return said

    def valid(self) -> dict[str, list[Any]]:
        """Arguments of each function that a caller may well pass."""
        new, engine, target = self.new, self.engine, self.target
        text, ids, numbers = new("char[]", 64), new("int32_t[]", [5] * 16), new("float[]", 4096)
        draft = new("pld_draft_request *", {"n_max": N_MAX, "n_min": 0, "margin": 0.0, "p_min": 0.0})
        verify = new("pld_verify_request *", {"n": N_MAX})
        many = new("int32_t[]", 16 * 64)
        model_params = new("pld_model_params *", {"n_gpu_layers": 0, "header_only": 1})
        engine_params = new("pld_engine_params *", ENGINE | KV)
        return {
            "pld_struct_size": [b"pld_verdict"],
            "pld_build_info": [b"version"],
            "pld_device": [0, new("pld_device_info *")],
            "pld_log_next": [new("int32_t *"), new("int32_t *"), text, 64],
            "pld_model_open": [self.path, model_params, new("pld_model **")],
            "pld_model_free": [ffi.NULL],
            "pld_model_get_info": [target, new("pld_model_info *")],
            "pld_model_n_meta": [target],
            "pld_model_meta_key": [target, 0, text, 64],
            "pld_model_meta": [target, b"general.name", text, 64],
            "pld_model_token": [target, 5, text, 64],
            "pld_model_tensors": [target, new("pld_tensor_info[]", 2), 2],
            "pld_model_check_pair": [target, self.draft],
            "pld_model_mismatch": [target, self.draft, 0, text, 64],
            "pld_model_tokenize": [target, b"the", 3, 1, 1, ids, 16],
            "pld_model_piece": [target, 5, 1, text, 64],
            "pld_model_is_eog": [target, 5],
            "pld_get_tensor_type": [2, new("pld_tensor_type *")],
            "pld_quantize_header": [*(target, many, self.n_tensors, 0, new("int32_t *"), text, 64)],
            "pld_quantize_rows": [0, 2, 32, 2, 1, numbers, 256, text, 36],
            "pld_kv_type": [b"f16"],
            "pld_engine_open": [target, self.draft, engine_params, new("pld_engine **")],
            "pld_engine_free": [ffi.NULL],
            "pld_engine_get_info": [engine, new("pld_engine_info *")],
            "pld_engine_get_state": [engine, 0, new("pld_engine_state *")],
            "pld_engine_get_memory": [engine, new("pld_engine_memory *")],
            "pld_engine_graphs": [engine, new("pld_graph[]", 4), 4],
            "pld_engine_devices": [engine, new("pld_device_memory[]", 2), 2],
            "pld_plan": [
                *(self.path, model_params, self.draft_path, model_params, engine_params),
                *(new("int32_t *"), new("pld_device_memory[]", 2), 2),
            ],
            "pld_engine_reset": [engine, 0],
            "pld_engine_begin": [engine, 0, ids, 16, new("int32_t *")],
            "pld_engine_prefill": [engine, 0],
            "pld_engine_draft": [
                *(engine, draft, 1, new("int32_t *"), ids, numbers, many, numbers, new("int64_t *")),
            ],
            "pld_engine_verify": [
                *(engine, verify, 1, ids, many, numbers, new("pld_verdict *"), new("int64_t *")),
            ],
            "pld_engine_logits": [engine, 0, numbers],
            "pld_engine_tokens": [engine, 0, ids, 16],
            "pld_engine_state_size": [engine, 0],
            "pld_engine_state_get": [engine, 0, new("uint8_t[]", len(self.state)), len(self.state)],
            "pld_engine_state_set": [engine, 0, self.state, len(self.state)],
        }


@contextmanager
def freed(name: str, args: list[Any]) -> Iterator[None]:
    """Free what an open call made."""
    if not name.endswith("_open"):
        yield
        return
    out = args[-1]
    if out != ffi.NULL:
        out[0] = ffi.NULL
    yield
    if out != ffi.NULL:
        getattr(lib, name.replace("_open", "_free"))(out[0])


def each_argument(stage: Stage) -> None:
    """Each pointer NULL, each number out of range, one at a time."""
    for name in stage.valid():
        for at, ctype in enumerate(ffi.typeof(getattr(lib, name)).args):
            numbers = INTS if ctype.kind == "primitive" else []
            if (name, at) in SIZES:  # a larger one would be a lie about the buffer
                numbers = [min(n, 1) for n in numbers]
            for value in [*numbers, *([ffi.NULL] if ctype.kind == "pointer" else [])]:
                args = stage.valid()[name]
                args[at] = value
                with freed(name, args):
                    call(f"{name} {at} {'NULL' if value == ffi.NULL else value}", name, *args)


def each_field(stage: Stage) -> None:
    """Each field of a struct of options out of range, one at a time."""
    for name, at in (("pld_model_open", 1), ("pld_engine_open", 2), ("pld_engine_draft", 1), ("pld_engine_verify", 1)):
        if name in ("pld_engine_draft", "pld_engine_verify"):
            stage.say()
        for field, info in ffi.typeof(stage.valid()[name][at]).item.fields:
            array = info.type.kind == "array"
            kind = info.type.item if array else info.type
            values = FLOATS if kind.cname == "float" else [*INTS, *(range(-2, 50) if "type" in field else ())]
            for value in values:
                args = stage.valid()[name]
                setattr(args[at], field, [value] if array else value)
                if array:
                    setattr(args[at], COUNTS[field], 1)
                with freed(name, args):
                    call(f"{name}.{field} {value}", name, *args)


def orders(stage: Stage) -> None:
    """Calls before what they need, and models of the wrong kind."""
    new, valid = stage.new, stage.valid()
    for step in ("reset", "begin"):
        stage.say()
        call(f"after {step}: {step}", f"pld_engine_{step}", *valid[f"pld_engine_{step}"])
        for name in ("draft", "verify", "logits"):
            call(f"after {step}: {name} refused", f"pld_engine_{name}", *valid[f"pld_engine_{name}"])
    stage.say()
    for label, ids, n in [
        ("n 0", [1], 0),
        ("n -1", [1], -1),
        ("id -1", [1, -1], 2),
        ("id n_vocab", [431, 1], 2),
        ("id INT_MAX", [INT_MAX] * 7, 7),
        ("id INT_MIN", [INT_MIN] * 7, 7),
        ("n n_ctx + 1", [1] * (N_CTX + 1), N_CTX + 1),
        ("n n_max + 1", [1] * (N_MAX + 1), N_MAX + 1),
    ]:
        buffer = new("int32_t[]", ids)
        if label != "n n_max + 1":  # as a prompt that is none too long
            call(f"begin {label} refused", "pld_engine_begin", stage.engine, 0, buffer, n, new("int32_t *"))
        if n != 0:
            request = new("pld_verify_request *", (0, n))
            rest = ffi.NULL, ffi.NULL, new("pld_verdict *"), ffi.NULL
            call(f"verify {label} refused", "pld_engine_verify", stage.engine, request, 1, buffer, *rest)
    target, draft = stage.header
    pairs = {
        "header as target": (target, stage.draft),
        "header as draft": (stage.target, draft),
        "swapped": (stage.draft, stage.target),
        "draft alone": (stage.draft, ffi.NULL),
        "target twice": (stage.target, stage.target),
        "draft twice": (stage.draft, stage.draft),
    }
    for label, pair in pairs.items():
        args = [*pair, *valid["pld_engine_open"][2:]]
        with freed("pld_engine_open", args):
            call(f"open {label} refused", "pld_engine_open", *args)
    call("tokenize on a header refused", "pld_model_tokenize", target, b"a", 1, 1, 1, new("int32_t[]", 8), 8)
    call("piece on a header refused", "pld_model_piece", target, 5, 1, new("char[]", 8), 8)
    call("is_eog on a header refused", "pld_model_is_eog", target, 5)
    call("pair of headers", "pld_model_check_pair", target, draft)
    for label, pair in {"target twice": (target, target), "swapped": (draft, target)}.items():
        for aspect in range(5):
            call(f"mismatch {aspect} of {label}", "pld_model_mismatch", *pair, aspect, ffi.NULL, 0)


def free_orders(stage: Stage) -> None:
    """An engine keeps its models; they are freed before it here."""
    for model in (stage.target, stage.draft, *stage.header):
        lib.pld_model_free(model)
    call("engine after its models", "pld_engine_prefill", stage.engine, 0)
    stage.say()
    lib.pld_engine_free(stage.engine)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    lib.pld_init()
    stage = Stage(*sys.argv[1:])
    said = stage.say()
    steps: list[Callable[[Stage], None]] = [each_argument, each_field, orders]
    for step in steps:
        step(stage)
        assert stage.say() == said, step
    free_orders(stage)
    print(json.dumps("done"))


if __name__ == "__main__":
    main()
