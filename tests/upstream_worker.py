"""Run upstream's converter: upstream_worker.py TREE JOBS, in an environment that has torch and transformers.

TREE is llama.cpp's source, JOBS a JSON file with a list of [checkpoint, target's folder, output, type]. Nothing of the
tests is imported here: the tree has a gguf package of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])

import torch
from conversion import get_model_class
from conversion.base import ModelBase, TextModel
from gguf import LlamaFileType

TYPES = {
    "auto": LlamaFileType.GUESSED,
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
}


def pre_tokenizer(self: Any, tokenizer: Any) -> str:
    """Upstream knows tokenizers by a hash of what they do, and the tiny one is not in its list."""
    return "gpt-2"


TextModel.get_vocab_base_pre = pre_tokenizer
for source, target, out, outtype in json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")):
    config = ModelBase.load_hparams(Path(source), False)
    kind = get_model_class(config["architectures"][0])
    with torch.inference_mode():
        kind(Path(source), TYPES[outtype], Path(out), target_model_dir=Path(target)).write()
