"""Turn what a caller may pass as a prompt into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from reprlib import repr as short
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from . import _chat
from ._ffi import Ints
from .model import Model

Tokens = Union[Sequence[int], "npt.NDArray[np.integer[Any]]"]
Prompt = Union[str, Tokens]


def prompt_ids(
    model: Model,
    prompt: Prompt | None,
    messages: _chat.Messages | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Ints:
    """Return the token ids [n >= 1] of a prompt or of messages, exactly one of which is given.

    Raises:
        ValueError: both or neither is given, there are no tokens, or an id is not in the vocabulary.
    """
    if (prompt is None) == (messages is None):
        raise ValueError("give either prompt or messages" + ("" if prompt is None else ", not both"))
    if prompt is not None and chat_template_kwargs:
        raise ValueError("chat_template_kwargs needs messages; a prompt is not sent through the chat template")
    if not isinstance(chat_template_kwargs, (Mapping, type(None))):
        raise TypeError(f"chat_template_kwargs={short(chat_template_kwargs)} is not a mapping")
    if messages is not None:
        ids = token_ids(_chat_ids(model, messages, chat_template_kwargs or {}), model.info.n_vocab)
    elif isinstance(prompt, str):
        ids = token_ids(model.tokenize(prompt), model.info.n_vocab)
    else:
        ids = token_ids(prompt if prompt is not None else (), model.info.n_vocab)
    if not len(ids):
        raise ValueError("the prompt has no tokens; give at least one")
    return ids


def token_ids(tokens: Tokens, n_vocab: int) -> Ints:
    """Return token ids as int32 [n]; TypeError if they are none, ValueError if one is not in the vocabulary."""
    if isinstance(tokens, (str, bytes, bytearray)):
        raise TypeError(f"tokens={short(tokens)} are text, not ids; use Model.tokenize() first")
    ids = _flat(tokens)
    if ids is None:
        raise TypeError(f"tokens={short(tokens)} are not a flat sequence of token ids")
    outside = np.flatnonzero((ids < 0) | (ids >= n_vocab))
    if outside.size:
        index = int(outside[0])
        raise ValueError(f"token {ids[index]} at index {index} is not in the vocabulary, 0 to {n_vocab - 1}")
    return np.ascontiguousarray(ids, dtype=np.int32)


def _flat(tokens: Tokens) -> npt.NDArray[Any] | None:
    with suppress(ValueError):  # numpy's, for lists of different lengths
        ids = np.asarray(tokens)
        if ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size):
            return ids
    return None


def _chat_ids(model: Model, messages: _chat.Messages, variables: Mapping[str, Any]) -> list[int]:
    # Most templates write the beginning token out; none of them wants an end token after the open turn.
    ids = model.tokenize(model.apply_chat_template(messages, **variables), add_special=False)
    bos = model.info.bos
    return [bos, *ids] if model.info.add_bos and bos is not None and ids[:1] != [bos] else ids
