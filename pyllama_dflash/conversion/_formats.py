"""The formats of checkpoints: z-lab's, and that of the speculators library, which nests the decoder's configuration."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from .._log import emit
from ._checkpoint import CONFIG, read_json
from ._config import DraftConfig, Lookup
from ._rope import rope_of

_KNOWN = {"DFlashDraftModel": 1, "DFlash2DraftModel": 2}  # z-lab's
_TYPES = {"dflash": 1, "dflash2": 2}  # of speculators
_OF_VERSION_2 = {
    "conv_taps": "conv_kernel_size",
    "conv_group": "conv_group_size",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
}
_SCALES = {
    "output_multiplier": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
    "input_embedding_scale": "embedding_scale",
    "attention_value_scale": "attention.value_scale",
}
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
_ROTARY = "rotary_emb.inv_freq"  # a table that follows from the configuration
_DSPARK = "is a DSpark draft; only DFlash and DFlash2 drafts are run here"
logger = logging.getLogger("pyllama_dflash.conversion")


def read_config(folder: Path) -> DraftConfig:
    """Describe the draft of a checkpoint.

    Raises:
        ModelLoadError: config.json is missing, damaged or incomplete, or of a kind that is not supported.
    """
    path = folder / CONFIG
    top = Lookup(path, read_json(path))
    kind = top.get("speculators_model_type")
    if not isinstance(kind, (str, type(None))):
        raise top.fail(f"speculators_model_type={kind!r} is no name; use the config.json that came with the checkpoint")
    if kind is not None or top.get("transformer_layer_config") is not None:
        return _speculators(top)
    return _zlab(top)


def _zlab(top: Lookup) -> DraftConfig:
    names = top.get("architectures")
    names = [str(name) for name in names] if isinstance(names, list) else []
    if any("dspark" in name.lower() for name in names):
        raise top.fail(_DSPARK)
    version = next((_KNOWN[name] for name in names if name in _KNOWN), None)
    if version is None:
        known = f"{', '.join(_KNOWN)} and checkpoints of speculators"
        raise top.fail(f"architecture {', '.join(names) or 'unknown'} is not one that is converted here: {known}")
    own = Lookup(top.path, top.mapping("dflash_config"), *top.values)
    layers = tuple(
        layer + 1 for layer in own.wholes("target_layer_ids")
    )  # from the output of one to the input of the next
    rope, factors = rope_of(top, "full_attention", _d_head(top))
    windowed, window = _windows(top)
    causal = top.flag("is_causal")
    causal = own.flag("causal") if causal is None else causal
    if own.flag("use_swa"):
        windowed, window = (
            (True,) * _n_layer(top),
            own.whole("swa_window_size", top.whole("sliding_window", 1)),
        )
    elif causal is None:
        causal = _causal_of_windows(top.path, windowed)
    return DraftConfig(
        **_decoder(top),
        **_second_version(own, version),
        version=version,
        n_vocab_draft=top.whole("vocab_size"),
        block_size=own.whole("block_size", 16, low=2),
        target_layers=layers,
        mask_token=_mask(own),
        window=window,
        windowed=windowed,
        causal=causal,
        interleaved=top.flag("rope_is_neox_style") is False,
        scales=_scales(own),
        rope=rope,
        rope_factors=factors,
        ignored=(_ROTARY,) if top.flag("has_embed_tokens") is not False else (_ROTARY, "embed_tokens.weight"),
    )


def _speculators(top: Lookup) -> DraftConfig:
    kind = top.get("speculators_model_type") or "unknown"
    if kind == "dspark":
        raise top.fail(_DSPARK)
    if kind not in _TYPES:
        raise top.fail(f"speculators_model_type={kind!r} is not one that is converted here: {', '.join(_TYPES)}")
    if top.flag("sample_from_anchor"):
        raise top.fail("sample_from_anchor=true: drafts that predict at the anchor's own position are not run here")
    decoder = Lookup(top.path, top.mapping("transformer_layer_config"))
    if top.get("target_hidden_size") not in (None, decoder.whole("hidden_size")):
        raise top.fail(
            f"target_hidden_size={top.get('target_hidden_size')} differs from hidden_size; this is not supported"
        )
    rope, factors = rope_of(decoder, "sliding_attention", _d_head(decoder))
    windowed, window = _windows(decoder)
    both_ways = top.flag("sliding_window_non_causal")
    if both_ways is None:
        both_ways = kind == "dflash2"
    n_vocab = decoder.whole("vocab_size")
    reduced = top.whole("draft_vocab_size", n_vocab) != n_vocab
    # The target's own tables may be among them, frozen in training.
    ignored = (_ROTARY, "verifier_norm.weight", "verifier_lm_head.weight", "embed_tokens.weight", "t2d")
    return DraftConfig(
        **_decoder(decoder),
        **_second_version(top, _TYPES[kind]),
        version=_TYPES[kind],
        n_vocab_draft=top.whole("draft_vocab_size", n_vocab, high=n_vocab),
        block_size=top.whole("block_size", 8, low=2),
        target_layers=top.wholes("aux_hidden_state_layer_ids"),
        mask_token=_mask(top),
        window=window,
        windowed=windowed,
        causal=(False if any(windowed) else None) if both_ways else _causal_of_windows(top.path, windowed),
        own_tables=False,
        rope=rope,
        rope_factors=factors,
        ignored=ignored if reduced else (*ignored, "lm_head.weight", "d2t"),
    )


def _decoder(config: Lookup) -> dict[str, Any]:
    """Return what both formats say in the same words."""
    if config.get("quantization_config") is not None:
        raise config.fail("the checkpoint is quantised (quantization_config); convert from the one in bf16, f16 or f32")
    activation = config.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise config.fail(f"hidden_act={activation!r} is not supported; known are {', '.join(_ACTIVATIONS)}")
    config.need("rms_norm_eps")
    n_head = config.whole("num_attention_heads", high=65536)
    return {
        "n_embd": config.whole("hidden_size", high=1 << 20),
        "n_layer": _n_layer(config),
        "n_ff": config.whole("intermediate_size", high=1 << 24),
        "n_head": n_head,
        "n_kv": config.whole("num_key_value_heads", n_head, high=n_head),
        "d_head": _d_head(config),
        "n_ctx": config.whole("max_position_embeddings", 0),
        "n_vocab": config.whole("vocab_size", high=1 << 24),
        "rms_eps": config.number("rms_norm_eps"),
        "activation": activation,
    }


def _d_head(config: Lookup) -> int:
    return config.whole("head_dim", config.whole("hidden_size") // config.whole("num_attention_heads"), high=65536)


def _n_layer(config: Lookup) -> int:
    return config.whole("num_hidden_layers", high=512)


def _second_version(config: Lookup, version: int) -> dict[str, Any]:
    if version == 1:
        return {}
    return {name: config.whole(key, high=1 << 20) for name, key in _OF_VERSION_2.items()}


def _mask(config: Lookup) -> int | None:
    return config.whole("mask_token_id", low=0) if config.get("mask_token_id") is not None else None


def _scales(config: Lookup) -> dict[str, float]:
    found = {key: config.number(name) for name, key in _SCALES.items()}
    return {key: value for key, value in found.items() if value is not None and (value > 0 or "softcap" not in key)}


def _windows(decoder: Lookup) -> tuple[tuple[bool, ...], int]:
    """Return which layers have a sliding window, and its size; (), 0 where none has."""
    n_layer = _n_layer(decoder)
    wanted, kinds = decoder.flag("use_sliding_window"), decoder.get("layer_types")
    if wanted is False or not (wanted or kinds) or decoder.get("sliding_window") is None:
        return (), 0
    if kinds is None:  # as transformers fills it in
        windowed = tuple(i >= decoder.whole("max_window_layers", 28, low=0) for i in range(n_layer))
    elif isinstance(kinds, list) and len(kinds) == n_layer:
        windowed = tuple(kind == "sliding_attention" for kind in kinds)
    else:
        raise decoder.fail(f"layer_types does not name one kind for each of {n_layer} layers; correct it")
    return (windowed, decoder.whole("sliding_window")) if any(windowed) else ((), 0)


def _causal_of_windows(path: Path, windowed: tuple[bool, ...]) -> bool | None:
    """Layers with a window are causal inside the block, and others are not; the file has one flag for all."""
    if not any(windowed):
        return None
    if all(windowed):
        return True
    text = "its layers with a sliding window are causal and the others are not, and a GGUF has one flag for all of them"
    emit(logging.WARNING, f"{path}: {text}: written as not causal, which may lower the acceptance", logger)
    return None
