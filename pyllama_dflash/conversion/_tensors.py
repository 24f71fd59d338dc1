"""Which tensors a draft has: their names in both formats and their shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import ModelLoadError
from ._checkpoint import CONFIG, Checkpoint
from ._config import DraftConfig

_MOST_NAMED = 3  # in a message


@dataclass(frozen=True)
class Wanted:
    """A tensor of the GGUF. shape: as numpy has it. sources: names it may have in a checkpoint, without "model.".

    turned: its rows are those of heads that RoPE turns.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    required: bool = True
    turned: bool = False


def wanted(c: DraftConfig) -> Iterator[Wanted]:
    """List the tensors of a draft, in the order that they are written in."""
    yield Wanted("token_embd.weight", (c.n_vocab, c.n_embd), ("embed_tokens.weight",), required=False)
    yield Wanted("output.weight", (c.n_vocab_draft, c.n_embd), ("lm_head.weight",), required=c.reduced)
    if c.reduced:
        yield Wanted("d2t", (c.n_vocab_draft,), ("d2t",))
    yield Wanted("fc.weight", (c.n_embd, len(c.target_layers) * c.n_embd), ("fc.weight",))
    yield Wanted("enc.output_norm.weight", (c.n_embd,), ("hidden_norm.weight",))
    yield Wanted("output_norm.weight", (c.n_embd,), ("norm.weight",))
    if c.version == 2:
        for name in ("predecessor", "successor"):
            stem = f"candidate_selector.{name}_codebook"
            yield Wanted(f"selector_{name}.weight", (c.n_vocab, c.selector_rank), (stem, f"{stem}.weight"))
        source = "candidate_selector.hidden_projection.weight"
        yield Wanted("selector_hidden.weight", (c.selector_rank, c.n_embd), (source,))
    for i in range(c.n_layer):
        yield from _layer(c, f"blk.{i}.", f"layers.{i}.")


def _layer(c: DraftConfig, to: str, of: str) -> Iterator[Wanted]:
    q, kv, attn = c.n_head * c.d_head, c.n_kv * c.d_head, f"{of}self_attn."
    yield Wanted(f"{to}attn_norm.weight", (c.n_embd,), (f"{of}input_layernorm.weight",))
    yield Wanted(f"{to}attn_q.weight", (q, c.n_embd), (f"{attn}q_proj.weight",), turned=True)
    yield Wanted(f"{to}attn_k.weight", (kv, c.n_embd), (f"{attn}k_proj.weight",), turned=True)
    yield Wanted(f"{to}attn_v.weight", (kv, c.n_embd), (f"{attn}v_proj.weight",))
    yield Wanted(f"{to}attn_output.weight", (c.n_embd, q), (f"{attn}o_proj.weight",))
    yield Wanted(f"{to}attn_q_norm.weight", (c.d_head,), (f"{attn}q_norm.weight",), turned=True)
    yield Wanted(f"{to}attn_k_norm.weight", (c.d_head,), (f"{attn}k_norm.weight",), turned=True)
    sinks = tuple(f"{attn}{name}{end}" for name in ("sinks", "attention_sink_bias") for end in ("", ".weight"))
    yield Wanted(f"{to}attn_sinks.weight", (c.n_head,), sinks, required=False)
    yield Wanted(f"{to}ffn_norm.weight", (c.n_embd,), (f"{of}post_attention_layernorm.weight",))
    yield Wanted(f"{to}ffn_gate.weight", (c.n_ff, c.n_embd), (f"{of}mlp.gate_proj.weight",))
    yield Wanted(f"{to}ffn_up.weight", (c.n_ff, c.n_embd), (f"{of}mlp.up_proj.weight",))
    yield Wanted(f"{to}ffn_down.weight", (c.n_embd, c.n_ff), (f"{of}mlp.down_proj.weight",))
    if c.version == 2:
        n_rows = 2 * c.conv_taps * (c.n_embd // c.conv_group)
        for side, conv in (("attn", "attention_conv"), ("ffn", "mlp_conv")):
            yield Wanted(f"{to}{side}_conv_base", (2, c.conv_taps, c.n_embd), (f"{of}{conv}.base_kernel",))
            source = f"{of}{conv}.kernel_projection.weight"
            yield Wanted(f"{to}{side}_conv_proj.weight", (n_rows, c.n_embd), (source,))


def match(config: DraftConfig, checkpoint: Checkpoint) -> list[tuple[Wanted, str]]:
    """Pair what a draft has with the names in its checkpoint.

    Raises:
        ModelLoadError: a tensor is missing, of another shape than config.json says, or not one of a draft.
    """
    left = {name[len("model.") :] if name.startswith("model.") else name: name for name in checkpoint.tensors}
    left = {name: stored for name, stored in left.items() if not name.endswith(config.ignored)}
    found, missing = [], []
    for tensor in wanted(config):
        source = next((name for name in tensor.sources if name in left), None)
        if source is not None:
            stored = left.pop(source)
            shape = checkpoint.tensors[stored].shape
            if shape != tensor.shape:
                raise ModelLoadError(
                    f"{checkpoint.tensors[stored].path}: tensor {stored} has shape {list(shape)} and {CONFIG} says "
                    f"{list(tensor.shape)}; use the {CONFIG} that came with the checkpoint"
                )
            found.append((tensor, stored))
        elif tensor.required:
            missing.append(tensor.sources[0])
    if missing:
        raise ModelLoadError(f"{checkpoint.folder}: {_listed(missing, 'missing')}; download the checkpoint again")
    if left:
        kind = "DFlash" if config.version == 1 else "DFlash2"
        raise ModelLoadError(
            f"{checkpoint.folder}: {_listed(sorted(left.values()), 'unexpected')}: {kind} in llama.cpp has none"
        )
    return found


def _listed(names: list[str], what: str) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"tensor {', '.join(names[:_MOST_NAMED])}{more} is {what}"
