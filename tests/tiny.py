"""Write tiny pairs of target and draft that share a rule, so that drafts are right often and not always.

Each token v has a direction e_v; all of them share a direction c. The target's head answers e_v with the token
NEXT[v], and its random layers overrule that rule now and then. A draft moves e_v from each slot of its block to the
slot after it, one step a layer, and a DFlash2 draft's selector knows the rule as well. Everything else in both is
random.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

N_EMBD, N_HEAD, N_KV, D_HEAD, N_FF = 320, 10, 2, 32, 320
CONV_TAPS, CONV_GROUP, RANK, TOP_K = 2, 16, 32, 16
LETTERS = "etaoinshrdlu"


def _byte_letters() -> list[str]:
    """The printable stand-in of each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_in = iter(range(256, 512))
    return [chr(byte if byte in plain else next(stand_in)) for byte in range(256)]


BYTES = _byte_letters()
SPACE = BYTES[32]
MERGES = [f"{a} {b}" for a in LETTERS for b in LETTERS] + [f"{SPACE} {chr(97 + i)}" for i in range(26)]
CONTROL = ["<bos>", "<eos>", "<mask>", "<|im_start|>", "<|im_end|>"]
TOKENS = BYTES + [merge.replace(" ", "") for merge in MERGES] + CONTROL
N_VOCAB = len(TOKENS)
BOS, EOS, MASK = (TOKENS.index(name) for name in CONTROL[:3])
# Tokens that the target says, in the order of the rule; the bytes of some characters come as single tokens.
SAID = [TOKENS.index(text) for text in ("th", "e", f"{SPACE}a", "n", f"{SPACE}o", "u", "t", ".", "an", "d", "in")]
SAID += [
    0xC3,
    0xA9,
    TOKENS.index(f"{SPACE}s"),
    0xE2,
    0x80,
    0xA6,
    TOKENS.index(","),
    0x0A,
    *(TOKENS.index(c) for c in "xyzqw"),
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class File:
    """A GGUF file before it is written: keys of the architecture without its name, tensors as numpy has them."""

    arch: str
    keys: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Array] = field(default_factory=dict)
    weights: str = "F32"  # of the matrices

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.arch)
        for key, value in self.keys.items():
            _add_key(
                writer, key if key.startswith(("tokenizer.", "general.", "xielu.")) else f"{self.arch}.{key}", value
            )
        kind = gguf.GGMLQuantizationType[self.weights]
        for name, array in self.tensors.items():
            if array.ndim < 2 or "conv_base" in name or array.dtype.kind == "i":
                writer.add_tensor(name, np.ascontiguousarray(array))
            else:
                writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, (list, tuple)):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


@dataclass(frozen=True)
class Target:
    """What a tiny target is like. wobble: how much its layers overrule the rule. twins: head rows that are equal."""

    arch: str = "llama"
    seed: int = 0
    weights: str = "F32"
    n_layer: int = 2
    eos: int = EOS
    wobble: float = 0.9
    twins: bool = False
    n_ctx: int = 2048

    def file(self) -> File:
        rng = np.random.default_rng([self.seed, 1])
        world = world_of(self.seed)
        out = File(self.arch, _common_keys(self.n_layer, self.n_ctx) | tokenizer(self.eos), weights=self.weights)
        out.keys["rope.freq_base"] = 10000.0
        out.tensors["token_embd.weight"] = world.embeddings()
        out.tensors["output.weight"] = world.target_head()
        out.tensors["output_norm.weight"] = np.ones(N_EMBD, np.float32)
        for i in range(self.n_layer):
            layer = _random_layer(rng, self.wobble, world.c)
            if self.arch != "qwen3":
                del layer["attn_q_norm.weight"], layer["attn_k_norm.weight"]
            out.tensors |= {f"blk.{i}.{name}": tensor for name, tensor in layer.items()}
        if self.twins:
            head = out.tensors["output.weight"]
            head[SAID[1::2]] = head[SAID[0::2]]
        return out


@dataclass(frozen=True)
class Draft:
    """What a tiny draft is like. window: a sliding window in its second layer. own: it has embeddings and a head.

    keys: metadata of its own. rare: a tensor that few drafts have.
    """

    version: int = 2
    block: int = 8
    n_layer: int = 3
    seed: int = 0
    weights: str = "F32"
    layers: tuple[int, ...] = (1, 0)
    own: bool = False
    window: int = 0
    causal: bool = False
    reduced: bool = False
    noise: float = 0.25
    poison: float | None = None
    keys: tuple[tuple[str, Any], ...] = ()
    rare: str = ""

    def file(self) -> File:
        rng = np.random.default_rng([self.seed, 2, self.version])
        world = world_of(self.seed)
        out = File("dflash", _common_keys(self.n_layer, 2048) | tokenizer(EOS), weights=self.weights)
        out.keys |= {"rope.freq_base": 10.0, "block_size": self.block, "target_layers": list(self.layers)}
        out.keys["attention.causal"] = self.causal
        if self.window:
            out.keys["attention.sliding_window"] = self.window
            out.keys["attention.sliding_window_pattern"] = [i == 1 for i in range(self.n_layer)]
        out.tensors["fc.weight"] = _random(rng, N_EMBD, N_EMBD * len(self.layers))
        for name in ("enc.output_norm.weight", "output_norm.weight"):
            out.tensors[name] = np.ones(N_EMBD, np.float32)
        # The target's head answers e_v with the token after v, a draft's own head with v itself.
        own_head = self.own or self.reduced
        for i in range(self.n_layer):
            layer = _random_layer(rng, self.noise, world.c)
            _shift_slots(layer, world.rule() if own_head else world.copy(), world.c)
            if self.version == 2:
                _add_convolutions(rng, layer)
            out.tensors |= {f"blk.{i}.{name}": tensor for name, tensor in layer.items()}
        if own_head:
            out.tensors["token_embd.weight"] = world.embeddings()
            out.tensors["output.weight"] = world.draft_head()
        if self.reduced:
            kept = np.array(sorted({*SAID, *range(0, N_VOCAB, 3)}), np.int64)
            out.tensors["output.weight"] = out.tensors["output.weight"][kept]
            out.tensors["d2t"] = kept
        if self.version == 2:
            out.keys |= {"conv_kernel_size": CONV_TAPS, "conv_group_size": CONV_GROUP}
            out.keys |= {"selector_rank": RANK, "selector_top_k": TOP_K}
            out.tensors |= world.selector(rng)
        out.keys |= dict(self.keys)
        if self.rare == "rope_freqs":
            out.tensors["rope_freqs.weight"] = np.linspace(1, 4, D_HEAD // 2, dtype=np.float32)
        elif self.rare == "attn_sinks":
            out.tensors |= {f"blk.{i}.attn_sinks.weight": np.ones(N_HEAD, np.float32) for i in range(self.n_layer)}
        elif self.rare:
            out.tensors |= {f"blk.{i}.{self.rare}.weight": np.ones(N_EMBD, np.float32) for i in range(self.n_layer)}
        if self.poison is not None:
            out.tensors["blk.0.ffn_down.weight"][:] = self.poison
        return out


# One of each kind that a test of what holds for all drafts should see.
DRAFTS = [
    Draft(),
    Draft(version=1),
    Draft(own=True),
    Draft(version=1, own=True, block=16),
    Draft(reduced=True, block=5),
    Draft(version=1, reduced=True),
    Draft(window=16, block=16),
    Draft(version=1, window=16, causal=True),
    Draft(causal=True, layers=(0, 1)),
    Draft(version=1, block=2, layers=(1,)),
    Draft(block=2),
]


class World:
    """What a target and its drafts have in common: a direction for each token and one for all."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 0])
        basis = np.linalg.qr(rng.standard_normal((N_EMBD, N_EMBD)))[0].astype(np.float32)
        self.c = basis[0]
        self.e = rng.standard_normal((N_VOCAB, N_EMBD)).astype(np.float32) @ (basis[30:].T @ basis[30:])
        self.e /= np.linalg.norm(self.e, axis=1, keepdims=True)
        self.e[SAID] = basis[1 : 1 + len(SAID)]
        self.e[MASK] = 0.0
        self.next = rng.choice(SAID, N_VOCAB)
        self.next[SAID] = [*SAID[1:], SAID[0]]

    def embeddings(self) -> Array:
        return self.e + self.c

    def target_head(self) -> Array:
        head = np.zeros((N_VOCAB, N_EMBD), np.float32)
        np.add.at(head, self.next, self.e)
        head[SAID] += 0.5 * self.c
        return head

    def draft_head(self) -> Array:
        head: Array = 0.1 * self.e
        head[SAID] = self.e[SAID] + 0.5 * self.c
        return head

    def copy(self) -> tuple[Array, Array]:
        """Projections (down [D_HEAD, N_EMBD], up [N_EMBD, D_HEAD]) that keep the direction of a token that is said."""
        down = np.zeros((D_HEAD, N_EMBD), np.float32)
        down[: len(SAID)] = self.e[SAID]
        return down, down.T.copy()

    def rule(self) -> tuple[Array, Array]:
        """The same, but from the direction of a token to that of the one after it."""
        down, up = self.copy()
        up[:, : len(SAID)] = self.e[self.next[SAID]].T
        return down, up

    def selector(self, rng: np.random.Generator) -> dict[str, Array]:
        before = rng.standard_normal((N_VOCAB, RANK)).astype(np.float32)
        after = 0.1 * rng.standard_normal((N_VOCAB, RANK)).astype(np.float32)
        after[self.next[SAID]] = before[SAID]
        hidden = np.outer(np.ones(RANK), self.c) / 20 + 0.002 * rng.standard_normal((RANK, N_EMBD))
        return {
            "selector_predecessor.weight": before,
            "selector_successor.weight": after,
            "selector_hidden.weight": hidden.astype(np.float32),
        }


@functools.lru_cache
def world_of(seed: int) -> World:
    """The world of a seed, made once; nobody changes it."""
    return World(seed)


def _random(rng: np.random.Generator, n_out: int, n_in: int, scale: float = 1.0) -> Array:
    out: Array = (scale / np.sqrt(n_in) * rng.standard_normal((n_out, n_in))).astype(np.float32)
    return out


def _random_layer(rng: np.random.Generator, scale: float, c: Array) -> dict[str, Array]:
    """A layer whose contributions to the residual stream have about that size, where an embedding has size 1.4."""
    size = scale / np.sqrt(N_EMBD)
    blind = np.eye(N_EMBD, dtype=np.float32) - np.outer(
        c, c
    )  # to what all tokens share: it would tip the scales for good
    return {
        "attn_norm.weight": np.ones(N_EMBD, np.float32),
        "attn_q.weight": _random(rng, N_HEAD * D_HEAD, N_EMBD, 2.0),
        "attn_k.weight": _random(rng, N_KV * D_HEAD, N_EMBD, 1.0),
        "attn_v.weight": _random(rng, N_KV * D_HEAD, N_EMBD) @ blind,
        "attn_output.weight": _random(rng, N_EMBD, N_HEAD * D_HEAD, 2.0 * size),
        "attn_q_norm.weight": np.ones(D_HEAD, np.float32),
        "attn_k_norm.weight": np.ones(D_HEAD, np.float32),
        "ffn_norm.weight": np.ones(N_EMBD, np.float32),
        "ffn_gate.weight": _random(rng, N_FF, N_EMBD) @ blind,
        "ffn_up.weight": _random(rng, N_FF, N_EMBD) @ blind,
        "ffn_down.weight": _random(rng, N_EMBD, N_FF, 2.0 * size),
    }


def _shift_slots(layer: dict[str, Array], projection: tuple[Array, Array], c: Array) -> None:
    """Let the first head read, at each slot, the slot one position before, and write its projection."""
    down, up = projection
    angle = 10.0 ** (-np.arange(D_HEAD // 2) / (D_HEAD // 2))  # rotation from one position to the next, freq_base 10
    query = np.concatenate([np.ones(D_HEAD // 2), np.zeros(D_HEAD // 2)])
    key = np.concatenate([np.cos(angle), np.sin(angle)])
    layer["attn_q_norm.weight"] = np.full(D_HEAD, 3.0, np.float32)
    layer["attn_k_norm.weight"] = np.full(D_HEAD, 3.0, np.float32)
    layer["attn_q.weight"][:D_HEAD] = np.outer(query, c)
    layer["attn_k.weight"][:D_HEAD] = np.outer(key, c)
    layer["attn_v.weight"][:D_HEAD] = down
    layer["attn_output.weight"][:, :D_HEAD] = up / np.sqrt(N_EMBD / 2)


def _add_convolutions(rng: np.random.Generator, layer: dict[str, Array]) -> None:
    for name in ("attn", "ffn"):
        base = 0.02 * rng.standard_normal((2, CONV_TAPS, N_EMBD)).astype(np.float32)
        base[:, 0] += 1.0
        layer[f"{name}_conv_base"] = base
        layer[f"{name}_conv_proj.weight"] = _random(rng, 2 * CONV_TAPS * (N_EMBD // CONV_GROUP), N_EMBD, 0.02)


def _common_keys(n_layer: int, n_ctx: int) -> dict[str, Any]:
    return {
        "general.name": "tiny",
        "context_length": n_ctx,
        "embedding_length": N_EMBD,
        "block_count": n_layer,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_KV,
        "attention.key_length": D_HEAD,
        "attention.value_length": D_HEAD,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": D_HEAD,
    }


def tokenizer(eos: int) -> dict[str, Any]:
    kinds = [gguf.TokenType.NORMAL] * (N_VOCAB - len(CONTROL)) + [gguf.TokenType.CONTROL] * len(CONTROL)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.ggml.mask_token_id": MASK,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


class Files:
    """Tiny files by what they are like, each written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[Any, Path] = {}

    def path(self, like: Target | Draft) -> Path:
        if like not in self._written:
            name = f"{type(like).__name__.lower()}-{len(self._written)}.gguf"
            self._written[like] = like.file().write(self._folder / name)
        return self._written[like]

    def pair(self, target: Target | None = None, draft: Draft | None = None, **changes: Any) -> tuple[Path, Path]:
        """Paths of a target and a draft; changes are those of the draft's defaults."""
        return self.path(target or Target()), self.path(draft or dataclasses.replace(Draft(), **changes))
