"""Drafts that do not belong to the tiny target, or that are damaged, with what is said of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tiny import TOKENS, Draft, File

import pyllama_dflash as pd

Change = Callable[[File], None]


def changed(keys: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None, arch: str = "") -> Change:
    """Set keys and tensors, or drop those that are None."""

    def apply(file: File) -> None:
        file.arch = arch or file.arch
        for have, want in ((file.keys, keys), (file.tensors, tensors)):
            for name, value in (want or {}).items():
                have.pop(name, None)
                if value is not None:
                    have[name] = value

    return apply


def other_token(index: int) -> Change:
    tokens = list(TOKENS)
    tokens[index] = "otherwise"
    return changed({"tokenizer.ggml.tokens": tokens})


def shorter_vocabulary(file: File) -> None:
    for name in ("tokens", "token_type"):
        file.keys[f"tokenizer.ggml.{name}"] = file.keys[f"tokenizer.ggml.{name}"][:-1]


def map_changed(token: int) -> Change:
    """The second token of a reduced vocabulary, whose first is 0, is another."""

    def change(file: File) -> None:
        file.tensors["d2t"][1] = token

    return change


def few_tokens(file: File) -> None:
    for name in ("d2t", "output.weight"):
        file.tensors[name] = file.tensors[name][:8]


DROPPED_SELECTOR = dict.fromkeys(["selector_hidden.weight", "selector_predecessor.weight", "selector_successor.weight"])
MARKOV = {"markov_w1.weight": np.zeros((32, 32), np.float32)}

WRONG_DRAFTS: dict[str, tuple[Draft, Change, type[Exception], str]] = {
    "fewer tokens": (
        Draft(version=1),
        shorter_vocabulary,
        pd.IncompatibleModelsError,
        r"draft.gguf has 430 tokens and target-\d+.gguf has 431: they use different tokenizers",
    ),
    "another token": (
        Draft(),
        other_token(300),
        pd.IncompatibleModelsError,
        rf"token 300 is 'otherwise' in draft.gguf and '{TOKENS[300]}' in target-\d+.gguf: .* different tokenizers",
    ),
    "another last token": (Draft(version=1), other_token(430), pd.IncompatibleModelsError, "token 430 is 'otherwise'"),
    "a layer that the target lacks": (
        Draft(),
        changed({"target_layers": [1, 5]}),
        pd.IncompatibleModelsError,
        r"draft.gguf reads the input of layer 5 but target-\d+.gguf has 2 layers \(dflash.target_layers\)",
    ),
    "no layers": (
        Draft(),
        changed({"target_layers": None}),
        pd.ModelLoadError,
        "key dflash.target_layers is missing.*convert the draft again",
    ),
    "a layer twice": (
        Draft(),
        changed({"target_layers": [1, 1]}),
        pd.ModelLoadError,
        "key dflash.target_layers lists a layer twice",
    ),
    "no mask token": (
        Draft(),
        changed({"tokenizer.ggml.mask_token_id": None}),
        pd.ModelLoadError,
        "key tokenizer.ggml.mask_token_id is missing",
    ),
    "a mask token that does not exist": (
        Draft(),
        changed({"tokenizer.ggml.mask_token_id": 431}),
        pd.ModelLoadError,
        "tokenizer.ggml.mask_token_id = 431 is no token: the vocabulary has 431",
    ),
    "a block of one": (
        Draft(),
        changed({"block_size": 1}),
        pd.ModelLoadError,
        "key dflash.block_size = 1 is out of range, 2 to 256",
    ),
    "DFlash2 keys and no selector": (
        Draft(),
        changed(tensors=DROPPED_SELECTOR),
        pd.ModelLoadError,
        "has DFlash2 keys but no tensor selector_hidden.weight: incomplete DFlash2 draft",
    ),
    **{
        f"a reduced vocabulary with {what}": (Draft(reduced=True), map_changed(token), pd.ModelLoadError, message)
        for what, token, message in (
            ("a token twice", 0, r"its reduced vocabulary \(d2t\) names token 0 twice; convert"),
            ("a token too high", 431, r"its reduced vocabulary \(d2t\) names token 431; there are 431; convert"),
            ("a negative token", -1, r"its reduced vocabulary \(d2t\) names token -1; there are 431; convert"),
        )
    },
    **{
        f"a list of {what}": (like, changed({"draft_vocab": tokens}), pd.ModelLoadError, message)
        for what, like, tokens, message in (
            ("tokens with one twice", Draft(), [*range(20), 7], r"\(dflash.draft_vocab\) names token 7 twice; convert"),
            ("tokens with one too high", Draft(), [*range(20), 431], "names token 431; there are 431; convert"),
            ("tokens with a negative one", Draft(), [*range(20), -1], "names token -1; there are 431; convert"),
            ("too few tokens", Draft(), list(range(15)), "names 15 tokens, fewer than its 16 candidates; convert"),
            ("too few for DFlash", Draft(version=1), list(range(9)), "names 9 tokens, fewer than its 10 candidates"),
            ("one number", Draft(), 5, "names 1 tokens, fewer than its 16 candidates; convert"),
            ("no tokens", Draft(), "many", "key dflash.draft_vocab is no list of token ids; convert"),
            ("fractions", Draft(), [0.5] * 20, "key dflash.draft_vocab is no list of token ids; convert"),
            ("tokens beside a head", Draft(own=True), list(range(20)), "and it has an output head of its own; convert"),
            (
                "tokens beside d2t",
                Draft(reduced=True),
                list(range(20)),
                "and it has an output head of its own; convert",
            ),
        )
    },
    "a reduced vocabulary of fewer tokens than candidates": (
        Draft(reduced=True),
        few_tokens,
        pd.ModelLoadError,
        r"dflash.selector_top_k = \d+ is too many for embedding_length \d+ and 8 tokens",
    ),
    **{
        f"a selector and no {key}": (
            Draft(),
            changed({key: None}),
            pd.ModelLoadError,
            f"key dflash.{key} is missing; a DFlash2 draft needs it",
        )
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    },
}

USE_ANOTHER = "only DFlash and DFlash2 drafts are run here: use one of those made for the same target"
OTHER_KINDS = {
    "the architecture of an old converter": (
        changed(arch="dflash-draft"),
        "was made by a converter from before DFlash was merged .*; convert the draft again",
    ),
    "DSpark": (changed(tensors=MARKOV), f"is a DSpark draft; {USE_ANOTHER}"),
    "EAGLE-3": (changed(arch="eagle3"), f"is a draft of kind 'eagle3'; {USE_ANOTHER}"),
}
