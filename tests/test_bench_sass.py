"""What `bench sass` makes of machine code: its verdict, and how it counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import benching  # noqa: F401  makes bench importable
import pytest

from bench.gpu import sass

FEW, FLOATS, NORM = "_Z16mul_mat_few_colsIL9ggml_type12ELi8EEvPKc", "_Z13mul_mat_vec_fIfE", "_Z12rms_norm_f32"
LIBRARY = {"record": "library", "n_cubins": 1}


def kernel(name: str, launches: int = 0, dp4a: int = 0, empty: bool = False) -> dict[str, Any]:
    return {"record": "kernel", "name": name, "launches": launches, "dp4a": dp4a, "empty": empty}


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (kernel(FEW, 8, dp4a=512), ""),
        (kernel(FEW, 8), "no DP4A"),
        (kernel(FEW), "no DP4A"),
        (kernel(FEW, empty=True), ""),
        (kernel(FEW, 8, empty=True), "no DP4A"),
        (kernel(FLOATS), ""),
        (kernel(FLOATS, 1), "a product of floats was reached"),
        (kernel(NORM, 9), ""),
        (kernel("_Z23mul_mat_q_stream_k_fixupI", 9), ""),
    ],
)
def test_each_kernel_has_its_verdict(row: dict[str, Any], fault: str) -> None:
    assert [found.partition(":")[0] for found in sass.faults([LIBRARY, row])] == [fault] * bool(fault)


def test_a_library_without_code_is_a_fault() -> None:
    assert sass.faults([]) == ["the library holds no machine code of this architecture"]


def test_instructions_are_counted_by_what_they_do() -> None:
    lines = [
        "        /*0008*/                   MOV R1, c[0x0][0x20] ;                /* 0x4c98078000870001 */",
        "        /*0010*/         {         IDP.4A.S8.S8 R4, R5, R6, R4 ;         /* 0x53fb8202006e0404 */",
        "        /*0018*/              @!P0 HFMA2.MRG_H0 R2, R3, R4, R5 ;         /* 0x5d01020000470302 */",
        "        /*0028*/                   BPT.TRAP 0x1 ;                        /* 0xe3a00000001000c0 */",
        "        /*0030*/                   NOP ;                                 /* 0x50b0000000070f00 */",
        "                                                                         /* 0x001fc400fe2007f6 */",
    ]
    names = [match.group(1) for line in lines if (match := sass.INSTRUCTION.match(line))]
    assert sass.count(Counter(names)) == sass.Code(total=4, dp4a=1, half=1, traps=1)
