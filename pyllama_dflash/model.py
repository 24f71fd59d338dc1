"""A GGUF model: what it is, its metadata and its tokenizer."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, TypeVar, Union

import numpy as np

from . import _ffi, _fit, _log
from ._chat import Messages, render
from ._fingerprint import Source
from ._load import load_fields
from ._turn import Gate, call_both
from .params import LoadParams, check_int
from .result import SLOTS
from .tensors import counted

T = TypeVar("T")
PathLike = Union[str, "os.PathLike[str]", bytes, "os.PathLike[bytes]"]
logger = logging.getLogger(__name__)
NO_GPU = "there is no GPU that this build can use"


@dataclass(frozen=True, **SLOTS)
class ModelInfo:
    """What a GGUF file holds. Names are those of pld_model_info in native/pld.h.

    Args:
        kind: "target", "dflash", "dflash2", or "other" for a draft of a kind that is not run here.
        n_vocab: vocabulary size.
        n_ctx_train: context that the model was trained for, in tokens.
        n_embd: width of the hidden state.
        n_layer: number of layers.
        block_size: drafts: tokens in a block, anchor included; else 0.
        n_target_layers: drafts: number of the target's layer inputs that it reads; else 0.
        target_layers: drafts: which.
        selector_rank: DFlash2: rank of the selector; else 0.
        selector_top_k: DFlash2: candidates at a position; else 0.
        mask_token: id of the mask token, or None.
        own_embd: whether the file has token embeddings.
        own_head: whether the file has an output head.
        n_vocab_draft: drafts with a reduced vocabulary, as a head of their own or a list of rows of the target's: its
            size; else n_vocab.
        n_swa: sliding window in tokens; 0: none.
        causal: drafts: whether the block attends causally.
        bos: id of the beginning-of-sequence token, or None.
        eos: id of the end-of-sequence token, or None.
        add_bos: whether a prompt is to start with bos.
        device: name of the device that holds the output layer; None for a header.
        n_params: number of weights.
        n_bytes: bytes of all tensors.
    """

    kind: str
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    block_size: int
    n_target_layers: int
    target_layers: tuple[int, ...]
    selector_rank: int
    selector_top_k: int
    mask_token: int | None
    own_embd: bool
    own_head: bool
    n_vocab_draft: int
    n_swa: int
    causal: bool
    bos: int | None
    eos: int | None
    add_bos: bool
    device: str | None
    n_params: int
    n_bytes: int

    @property
    def is_draft(self) -> bool:
        """Whether the file is a draft, of whatever kind."""
        return self.kind != "target"


class Model:
    """An open model. Several Speculators may share one; close it after them, for they use its tokenizer.

    Args:
        path: a GGUF file.
        n_gpu_layers: layers on the GPU; -1: all.
        devices: names of GPUs to use, or "CPU" alone; None: all GPUs.
        split_mode: how the model is split over several: "none", "layer", "row" or "tensor".
        main_gpu: which of them holds the model with split_mode "none".
        tensor_split: each GPU's share, as (3, 1); None: by their free memory.
        use_mmap: map the file where the devices can; False: read it.
        use_mlock: keep what lies in host memory from being swapped out; a system that refuses is warned of in the log.
        repack: lay weights out for this CPU's matrix units (AMX, interleaved rows); False keeps them as in the file.

    Raises:
        ModelLoadError: the file is missing, damaged or not supported.
        MemoryError: the weights do not fit; the message has the figures.
        ValueError, TypeError: an option is out of range, or not what these devices can do.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        n_gpu_layers: int = -1,
        devices: str | Sequence[str] | None = None,
        split_mode: str = "layer",
        main_gpu: int = 0,
        tensor_split: Sequence[float] | None = None,
        use_mmap: bool = True,
        use_mlock: bool = False,
        repack: bool = True,
    ) -> None:
        params = LoadParams(n_gpu_layers, devices, split_mode, main_gpu, tensor_split, use_mmap, use_mlock, repack)
        self._open(path, params, header_only=False)

    @classmethod
    def header(cls, path: PathLike) -> Model:
        """Open a file's header only: info, metadata and check_pair() work, no weights are loaded."""
        model = cls.__new__(cls)
        model._open(path, LoadParams(n_gpu_layers=0), header_only=True)
        return model

    def _open(self, path: PathLike, params: LoadParams, header_only: bool) -> None:
        try:
            raw = os.fsencode(path)
        except TypeError:
            raise TypeError(f"path={path!r} is not a path; use a string, bytes or os.PathLike") from None
        if not raw:
            raise ValueError(f"path={path!r} is empty")
        self.path = os.fsdecode(raw)
        if b"\0" in raw:
            raise ValueError(f"path={self.path!r} has a NUL character")
        on_cpu = params.devices == ("CPU",)
        if params.n_gpu_layers > 0 and (on_cpu or not _ffi.supports_gpu()):
            why = "devices='CPU' takes no GPU" if on_cpu else NO_GPU
            text = f"n_gpu_layers={params.n_gpu_layers} has no effect: {why}"
            _log.emit(logging.WARNING, text, logger)
        self._source = Source.of(self.path)
        _log.sync_level()
        try:
            _ffi.init()
            if not header_only:
                _fit.check_files(_fit.File(raw, params), None, None)
            self._handle = _ffi.model_open(raw, load_fields(params, header_only))
        finally:
            _log.drain()
        self._gate = Gate("Model", self._handle.close)
        self._vocab: dict[int, tuple[bytes, bool]] = {}
        self.is_header = header_only
        self._file = _fit.File(raw, params, loaded=True)
        self.info = self._call(lambda handle: _info(handle))

    @property
    def name(self) -> str:
        """The file's name."""
        return Path(self.path).name

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._gate.closed

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the file's chat template, or None."""
        return self.meta("tokenizer.chat_template")

    @property
    def tensor_types(self) -> str:
        """The types of the tensors and how many there are of each, as "F32 61, Q4_0 28"."""
        return counted(tensor["type"] for tensor in self._call(_ffi.model_tensors))

    def meta(self, key: str) -> str | None:
        """Return a metadata value as text, None if the file does not have the key."""
        if not isinstance(key, str):
            raise TypeError(f"key={key!r} is not a string")
        if "\0" in key:  # C would take what is before it
            return None
        with suppress(ValueError):
            return self._call(lambda handle: _ffi.model_meta(handle, key))
        return None

    def metadata(self) -> dict[str, str]:
        """Return all metadata as text."""
        return self._call(lambda handle: {key: _ffi.model_meta(handle, key) for key in _ffi.model_meta_keys(handle)})

    def check_pair(self, draft: Model) -> None:
        """Check that a draft belongs to this target; headers suffice.

        Raises:
            IncompatibleModelsError: it does not; the message says why, the first reason of mismatches().
        """
        if not isinstance(draft, Model):
            raise TypeError(f"draft={draft!r} is not a Model")
        call_both(self._gate, draft._gate, lambda: _ffi.model_check_pair(self._handle, draft._handle))

    def mismatches(self, draft: Model) -> tuple[str, ...]:
        """Return all reasons why a draft does not belong here, a sentence with the fix each; headers suffice."""
        if not isinstance(draft, Model):
            raise TypeError(f"draft={draft!r} is not a Model")

        def find() -> tuple[str, ...]:
            first = _ffi.model_mismatch(self._handle, draft._handle, "kind")
            swapped = self.info.is_draft and not draft.info.is_draft
            if first and not swapped:
                return (first,)  # what is no draft has nothing else to compare
            target, other = (draft, self) if swapped else (self, draft)
            found = (_ffi.model_mismatch(target._handle, other._handle, aspect) for aspect in _ffi.ASPECTS)
            return tuple(dict.fromkeys(filter(None, (first, *found))))

        return call_both(self._gate, draft._gate, find)

    def apply_chat_template(self, messages: Messages, /, **variables: Any) -> str:
        """Render messages by the file's chat template, up to the start of the assistant's turn.

        Args:
            messages: mappings with "role" and "content", or a string as the one message of the user.
            **variables: further variables of the template, e.g. enable_thinking or add_generation_prompt=False.

        Raises:
            ValueError: the file has no template, the messages are malformed, or the template refuses them.
        """
        template = self.chat_template
        if template is None:
            raise ValueError(f"{self.name} has no chat template; render the messages yourself and pass them as prompt")
        bos, eos = self._spelled(self.info.bos), self._spelled(self.info.eos)
        try:
            return render(template, messages, variables, bos=bos, eos=eos)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error

    def _spelled(self, token: int | None) -> str:
        return "" if token is None else self.piece(token, special=True).decode("utf-8", "replace")

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Turn text into token ids.

        Args:
            text: the text.
            add_special: add the beginning and end tokens that the model is configured for.
            parse_special: control tokens written out in the text become those tokens.

        Raises:
            ValueError: the text has a lone surrogate, which UTF-8 cannot carry.
        """
        if not isinstance(text, str):
            raise TypeError(f"text={text!r} is not a string")
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text has the lone surrogate {text[error.start]!r} at index {error.start}; "
                "use text.encode('utf-8', 'replace').decode() or correct its source"
            ) from None
        return self._call(lambda handle: _ffi.model_tokenize(handle, raw, add_special, parse_special))

    def detokenize(self, tokens: Iterable[int], special: bool = False) -> str:
        """Turn token ids into text: their bytes joined; what is not UTF-8 becomes U+FFFD.

        Args:
            tokens: the ids.
            special: spell out control tokens.
        """
        return b"".join(self.piece(token, special=special) for token in tokens).decode("utf-8", "replace")

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of a token, which may be part of a character.

        Args:
            token: the id.
            special: spell out control tokens, which are else empty.

        Raises:
            ValueError: there is no such token.
        """
        token = check_int("token", token, 0, self.info.n_vocab - 1)
        if special:
            return self._call(lambda handle: _ffi.model_piece(handle, token, True))
        return self._entry(token)[0]

    def is_eog(self, token: int) -> bool:
        """Say whether a token ends generation."""
        return self._entry(check_int("token", token, 0, self.info.n_vocab - 1))[1]

    def layer_input(self, tokens: Sequence[int], layer: int) -> _ffi.Floats:
        """Run tokens through a target and return what a draft that reads a layer would see.

        Args:
            tokens: ids, 1 to 4096 of them, from position 0 on.
            layer: its index; 0 is the first.

        Returns:
            The layer's input, float32 [len(tokens), n_embd].

        Raises:
            IncompatibleModelsError: models of this kind do not show that layer's input.
            ValueError: a token or the layer does not exist, or the tokens are too few or too many.
        """
        ids = np.array([check_int("token", token, 0, self.info.n_vocab - 1) for token in tokens], np.int32)
        layer = check_int("layer", layer, 0, self.info.n_layer - 1)
        return self._call(lambda handle: _ffi.model_layer_input(handle, ids, layer, self.info.n_embd))

    def _entry(self, token: int) -> tuple[bytes, bool]:
        entry = self._vocab.get(token)
        if entry is None:
            entry = self._call(
                lambda handle: (_ffi.model_piece(handle, token, False), _ffi.model_is_eog(handle, token))
            )
            self._vocab[token] = entry
        return entry

    def _call(self, function: Callable[[_ffi.ModelHandle], T]) -> T:
        return self._gate.call(lambda: function(self._handle))

    def close(self) -> None:
        """Give the model back; its memory is freed once no Speculator uses it either. Safe to repeat."""
        self._gate.close()

    def __enter__(self) -> Model:
        self._gate.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.info.kind + (", header only" if self.is_header else "")
        return f"<Model {self.name!r} ({state})>"


def _info(handle: _ffi.ModelHandle) -> ModelInfo:
    fields = _ffi.model_info(handle)
    for name in ("own_embd", "own_head", "causal", "add_bos"):
        fields[name] = bool(fields[name])
    for name in ("mask_token", "bos", "eos"):
        fields[name] = None if fields[name] < 0 else fields[name]
    fields["target_layers"] = fields["target_layers"][: fields["n_target_layers"]]
    fields["device"] = None if fields["device"] < 0 else _ffi.device(fields["device"])["name"]
    fields["kind"] = _ffi.KINDS.get(fields["kind"], "other")
    return ModelInfo(**fields)
