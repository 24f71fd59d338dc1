"""What upstream's converter makes of some checkpoints.

Run as a program it writes that to upstream_convert.json: upstream_convert.py [ARCHIVE]. ARCHIVE is the pinned source
archive, which is fetched if it is not given. Recording needs torch, transformers and safetensors; comparing with what
was recorded needs none of them.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import gguf
import numpy as np
import tiny
from checkpoints import Checkpoint, noise

import vendor

RECORD = Path(__file__).with_suffix(".json")
KEEP = ("conversion/", "gguf-py/gguf/")


@dataclasses.dataclass(frozen=True)
class Recorded(tiny.Target):
    """A target whose tables are the same bytes on every CPU; those of a tiny world are sums, rounded as it adds."""

    def file(self) -> tiny.File:
        out = super().file()
        out.tensors["token_embd.weight"] = noise(106, tiny.N_VOCAB, tiny.N_EMBD)
        out.tensors["output.weight"] = noise(107, tiny.N_VOCAB, tiny.N_EMBD)
        return out


TARGET = Recorded(n_layer=3, weights="F16")


def plain() -> Checkpoint:
    return checkpoints.random(version=1, ids=(0, 1))


def second() -> Checkpoint:
    return checkpoints.random(dtype="BF16")


def prefixed() -> Checkpoint:
    made = checkpoints.random(dtype="F16")
    made.prefix = "model."
    return made


def turned() -> Checkpoint:
    """Neighbours turned by RoPE, over a part of the head and stretched; scales; windows; tables of its own."""
    made = checkpoints.random(version=1, n_layer=2)
    made.tensors["embed_tokens.weight"] = noise(101, tiny.N_VOCAB, tiny.N_EMBD)
    made.tensors["lm_head.weight"] = noise(102, tiny.N_VOCAB, tiny.N_EMBD)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32.0}
    made.config |= {
        "rope_is_neox_style": False,
        "rope_parameters": {"rope_theta": 500000, "partial_rotary_factor": 0.5, **yarn},
        "use_sliding_window": True,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "is_causal": False,
    }
    scales = {"output_multiplier": 0.196, "final_logit_softcapping": 20.0, "input_embedding_scale": 3}
    made.config["dflash_config"] |= scales
    return made


def sinks() -> Checkpoint:
    """Sinks, one window for all layers, older names of the keys, and embeddings that are said not to count."""
    made = checkpoints.random(version=1)
    made.tensors["layers.0.self_attn.attention_sink_bias"] = noise(103, tiny.N_HEAD)
    made.tensors["embed_tokens.weight"] = noise(104, tiny.N_VOCAB, tiny.N_EMBD)
    del made.config["rope_parameters"]
    made.config |= {"rope_theta": 1000000, "rope_scaling": {"type": "linear", "factor": 2}, "has_embed_tokens": False}
    made.config |= {"block_size": 10}
    del made.config["dflash_config"]["block_size"]
    windows = {"use_swa": True, "swa_window_size": 64, "causal": True, "attention_value_scale": 0.5}
    made.config["dflash_config"] |= windows
    return made


# {"mask_token_id": MASK, "embedding": torch.arange(320, dtype=torch.bfloat16) / 64}, as torch 2.14 saves it.
MASK_FILE = (
    "c-oy+3v5$m82#IA?I;fsc?`wLlu3~>+OFF=UH@~eSkdt)FRh4{uDy)9uH9|#cnMm035Yll5fO13V~8P!5TlDRh7hB~7=y+bVhF)U3>u@v7(<LP"
    "-g^s6*D*l8liS<ee&6}d{rmmr54Dt(3Q=Az2E;fqRCGkM?GdG;Rf)$FskZ6ys1~j5Y)=LQcCk1gIqN!AIK#vB0y9}lw=1bgBCc9yAF_mp=#Tr#"
    "RclO3XJX51BVAe|nRP@mN^4gl8INd6Dx1zkR(Kq0iPIUj>qS{TGuo!8rTG#^Aec-?HFv{;{Bws|7PjbVF4Yz;(eJU&F4aDp7ELXm*CO;Uo75pK"
    "`iEm{ES63tm6(=Dr?QT@nYfZs;xiI4&7lsRGG860sl(^1Bf4rsE%x&7Uf*%#Q=QDXLW3?#rI=Q{EVawhnU1IyS)pXIdY@om%Ei^Wa=4Ao@Be;k"
    "gYi0+%XY33t^u7dtWzYKOthssl#~_>)LeaYJsP}*0IXDhw(2dcmlaSUe8mD<S8GbzSk+*_`@i~LjATO7l8T{WlmCbDHoc4OvKq#S#!F4*bXPD?"
    "cP#>h$TbT;{W*V+|ET|rU&xViqI5~hkX$M|WlnC9-Eyz&kq6~r*(;CA<MM<&DbL8W@|-*`1xitlVHk<gsK5kF#3VRT0~fsTp&7&s%)~5&un=J^"
    "!BWJr97%LS!z!#r4(qWIo3RDkupK+lja}G{J=lwV*pCC~!5erJZ{Z-`#v#0e!#IL>@g92d0Y1b>IErKV7@y!cKEvnu0w?elzQ#8=iEnWVr*Q_~"
    "<4632v-kzS;y0YbANUi0;XMAvKlm4d7Ft=tQkKz1JIgtQ4i4oo4(AA7$C13Aqj&>Ha}39F94k1UH}WP<;LWV$Eu6?I-pboJiPgNFlj-CX-odG?"
    ";WXBAI$d<r!#a9d&jvQq$0pv%yVy)WB|-9T26zu=@LmRaA7}D@KEM{v;%v_0T!uK0^SOWvxrh()A%^)d7xNJ=;iG(v5iVtvt&A~Fh0EB+<xKE#"
    "wlm2NrkG|YRc4r_#xAblO0ME+uHh40%XNH`Pcf(CX|6Z1fg4S1;${=iaEpnp+-BlgZa489cbIsd-6nQ&mx&j++r*39W8x+5HSsd{nRtc!O}xqj"
    "CSGF?jmfWU+IKpqZ$0B0eDcSN=HkikGaTPF?L8yv9EO4~540`1^8T+DQwJE3x%sk6CZRjfny6v3y7>nKldo2gyS~xmb2l~ByWPHeZ-cka<!Nv="
    "xa*ocO<s@3-RSYu`x^BWL*=nim2;fB4yUQoVu<b2S!mwl1}Goo94jU%^x?|>hoMDW!S#!|3N5v&AJ@)Ha1HSBV!A?itmsEK$|?qR<zkk?NgLCT"
    "Wsg-{+E<Gy3P)vZKZ@=$G01=xa}@rO)%{<_Ca!M8LM=91&BY_RWLh7Az36W0)T7syzw348PrVnU<d57kTfW9_=I3+&10Z8xX#"
)


def masked() -> Checkpoint:
    """A row of its own for the mask token."""
    made = checkpoints.random(version=1)
    made.files["mask_embedding.pt"] = zlib.decompress(base64.b85decode(MASK_FILE))
    return made


def reduced() -> Checkpoint:
    """Speculators' format with a part of the vocabulary, which upstream reads of DSpark drafts only."""
    made = Checkpoint(checkpoints.speculators_config(version=1), checkpoints.random(version=1).tensors)
    n_draft = tiny.N_VOCAB // 3
    made.config["draft_vocab_size"] = n_draft
    made.tensors["lm_head.weight"] = noise(105, n_draft, tiny.N_EMBD)
    made.tensors["d2t"] = 2 * np.arange(n_draft)
    known = np.zeros(tiny.N_VOCAB, bool)
    known[3 * np.arange(n_draft)] = True
    made.tensors["t2d"] = known
    return made


CASES: dict[str, tuple[Callable[[], Checkpoint], tuple[str, ...]]] = {
    "plain": (plain, ("f32", "f16", "bf16", "q8_0", "auto")),
    "second": (second, ("f32", "f16", "bf16", "q8_0", "auto")),
    "prefixed": (prefixed, ("auto", "q8_0")),
    "turned": (turned, ("f16",)),
    "sinks": (sinks, ("f16",)),
    "masked": (masked, ("f16",)),
    "reduced": (reduced, ("f16",)),
}
# By what is in the folder's name, in a README or in upstream's habits; and of DSpark, which the case "reduced" is not.
LEFT_OUT = ("general.name", "general.basename", "general.size_label", "general.finetune", "general.version")
LEFT_OUT += ("dflash.sample_from_anchor", "dflash.has_confidence_head")


def facts(path: Path) -> dict[str, Any]:
    """The keys of a GGUF with their types and values, long ones by a digest, and its tensors."""
    reader = gguf.GGUFReader(path)
    keys = {}
    for key, found in reader.fields.items():
        if key.startswith("GGUF.") or key in LEFT_OUT:
            continue
        value = json.dumps(found.contents())
        if len(value) > 60:
            value = digest(value.encode())
        keys[key] = " ".join([*(kind.name for kind in found.types), value])
    tensors = {
        tensor.name: f"{tensor.tensor_type.name} {[int(n) for n in tensor.shape]} {digest(tensor.data.tobytes())}"
        for tensor in reader.tensors
    }
    return {"keys": dict(sorted(keys.items())), "tensors": dict(sorted(tensors.items()))}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def write_target(folder: Path) -> Path:
    """The tiny target in Hugging Face's layout."""
    folder.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], **checkpoints.decoder(TARGET.n_layer)}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    special = [
        {"id": tiny.TOKENS.index(name), "content": name, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for name in tiny.CONTROL
    ]
    n_words = len(tiny.TOKENS) - len(tiny.CONTROL)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tiny.TOKENS[:n_words])},
            "merges": tiny.MERGES,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": False, "chat_template": tiny.TEMPLATE}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    file = TARGET.file()
    tables = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
    Checkpoint(config, {name: file.tensors[key] for name, key in tables.items()}, "F16").write(folder)
    return folder


def record(folder: Path, python: str = sys.executable, archive: Path | None = None) -> dict[str, Any]:
    """Run upstream's converter on all cases."""
    tree = folder / "llama.cpp"
    vendor.sync(tree, keep=KEEP, patched=False, archive=archive)
    target = write_target(folder / "target")
    jobs = {}
    for name, (make, outtypes) in CASES.items():
        made = make()
        if name == "reduced":
            made.config["architectures"] = ["DSparkSpeculator"]
        made.write(folder / name)
        for outtype in outtypes:
            jobs[f"{name} {outtype}"] = (folder / name, target, folder / f"{name}-{outtype}.gguf", outtype)
    listed = folder / "jobs.json"
    listed.write_text(json.dumps([list(map(str, job)) for job in jobs.values()]), encoding="utf-8")
    worker = Path(__file__).with_name("upstream_worker.py")
    subprocess.run([python, str(worker), str(tree), str(listed)], check=True)
    return {name: facts(job[2]) for name, job in jobs.items()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        found = record(Path(temporary), archive=Path(sys.argv[1]) if sys.argv[1:] else None)
    RECORD.write_text(json.dumps(found, indent=0), encoding="utf-8")
    print(f"wrote {RECORD.name}: {', '.join(found)}")
