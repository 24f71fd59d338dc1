"""The C boundary answers every bad argument and every odd order of calls with a status, never with a signal."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import Files

WORKER = Path(__file__).with_name("abi_worker.py")
LEAST_STATUS = -7  # one below is a fault of the library
# Pointers that may be NULL: a draft, arrays that nobody wants, a text whose length is asked for, a handle to free.
NULLABLE = {
    *(
        f"pld_model_{name} NULL"
        for name in ("free 0", "meta_key 2", "meta 2", "token 2", "tensors 1", "mismatch 3", "piece 3", "tokenize 5")
    ),
    *(
        f"pld_engine_{name} NULL"
        for name in ("free 0", "open 1", "graphs 1", "devices 1", "verify 4", "verify 5", "verify 7", "tokens 2")
    ),
    *(f"pld_plan {at} NULL" for at in (0, 2, 4, 6)),
    *(f"pld_engine_draft {at} NULL" for at in (5, 6, 7, 8)),
    "pld_quantize_header 5 NULL",
}
# Numbers that stand for less or more than there is: a size is what it is, a flag is any number but 0.
OUT_OF_RANGE = ("device 0", "get_tensor_type 0", "meta_key 1", "model_token 1", "mismatch 2", "piece 1", "is_eog 1")
OUT_OF_RANGE += ("quantize_header 2", *(f"quantize_rows {at}" for at in (0, 1, 2, 3, 6, 8)))
OUT_OF_RANGE += ("get_state 1", "begin 1", "begin 3", "prefill 1", "draft 2", "verify 2", "logits 1")
OUT_OF_RANGE += ("engine_tokens 1", "state_size 1", "state_get 1", "state_set 1")
FIELDS_OUT_OF_RANGE = ("n_ctx", "n_ubatch", "n_threads", "flash_attn", "type_k", "type_v_draft", "n_min", "n_seq_max")
FIELDS_OUT_OF_RANGE += ("split_mode", "main_gpu", "n_devices", "n_split", "devices")


@pytest.fixture(scope="module")
def said(files: Files) -> dict[str, int]:
    """The status of each call."""
    done = subprocess.run(
        [sys.executable, WORKER, *map(str, files.pair())], capture_output=True, text=True, timeout=120, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, ""), f"in {lines[-1:]}"
    assert lines[-1] == "done"
    return {line[0]: int(line[1] or 0) for line in lines[:-1] if len(line) == 2}


def test_each_call_has_a_status(said: dict[str, int]) -> None:
    assert len(said) > 350
    assert not {label: status for label, status in said.items() if status < LEAST_STATUS}


def test_null_is_refused(said: dict[str, int]) -> None:
    nulls = {label: status for label, status in said.items() if label.endswith("NULL")}
    assert set(nulls) >= NULLABLE
    for label, status in nulls.items():
        assert (status < 0) == (label not in NULLABLE), (label, status)


def test_numbers_out_of_range_are_refused(said: dict[str, int]) -> None:
    for name in OUT_OF_RANGE:
        found = [
            status
            for label, status in said.items()
            if f"_{name} " in label and label.endswith((" -2147483648", " -1", " 2147483647"))
        ]
        assert len(found) == 3
        assert max(found) < 0, name
    for name in FIELDS_OUT_OF_RANGE:
        found = [
            status
            for label, status in said.items()
            if f".{name} " in label and label.endswith((" -2147483648", " -2", " 2147483647"))
        ]
        assert len(found) == 3
        assert max(found) < 0, name
    assert max(said[f"pld_model_open.tensor_split {value}"] for value in ("-1.0", "nan", "inf", "-inf")) < 0
    for name, value in itertools.product(("draft", "verify"), (-(2**31), -1, 1, 2**31 - 1)):
        assert said[f"pld_engine_{name}.seq {value}"] == -1
    for name in ("margin", "p_min"):
        assert said[f"pld_engine_draft.{name} nan"] == said[f"pld_engine_draft.{name} -1.0"] == -1


def test_odd_orders_are_refused(said: dict[str, int]) -> None:
    refused = {label: status for label, status in said.items() if label.endswith(" refused")}
    assert len(refused) >= 25
    assert max(refused.values()) < 0, refused


def test_engine_outlives_its_models(said: dict[str, int]) -> None:
    assert said["engine after its models"] == 0
