"""`python -m bench depth`: conversations of a wanted length, what its table says of rows, and a run in small."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benching import bench, records
from tiny import Files

from bench import depth
from bench.records import read_prompts


def row(tokens: int, window: int, n_max: int, ms: float, n_rounds: int, drafted: int, accepted: int) -> dict[str, Any]:
    counts = {"predicted_n": 100, "predicted_ms": ms, "draft_n": drafted, "draft_n_accepted": accepted}
    times = {"n_rounds": n_rounds, "t_draft_ms": 2.0 * n_rounds, "t_verify_ms": 1.0}
    arm = {"depth": tokens, "n_ctx_draft": window, "n_max": n_max, "n_prompt": tokens - 10}
    return {"record": "depth", **arm, **counts, **times, "same": n_rounds != 40, "others": 0.25}


ROWS = [
    {"record": "provenance", "options": {}},
    row(100, 0, 0, 1000, 100, 0, 0),
    row(100, 0, 3, 400, 25, 75, 75),
    row(100, 64, 3, 500, 25, 75, 75),
    row(900, 0, 0, 3000, 100, 0, 0),
    row(900, 0, 3, 2000, 40, 120, 60),
    row(900, 0, 3, 2000, 60, 180, 40),
    row(900, 64, 3, 1000, 25, 75, 75),
]


def test_a_table_has_a_line_for_each_depth_window_and_n_max() -> None:
    lines = [line.split() for line in depth.table(ROWS).splitlines()[1:]]
    # most tokens, tokens, arm; acceptance, mean_len, speed to plain; ms a round, to the first depth; draft's
    assert lines == [
        ["100", "90", "plain", "10.00", "1.00", "1/1", "25%"],
        ["100", "90", "trained", "3", "1.000", "4.000", "2.50", "16.00", "1.00", "2.00", "1/1", "25%"],
        ["100", "90", "64", "3", "1.000", "4.000", "2.00", "20.00", "1.00", "2.00", "1/1", "25%"],
        ["900", "890", "plain", "30.00", "3.00", "1/1", "25%"],
        ["900", "890", "trained", "3", "0.333", "2.000", "1.50", "40.00", "2.50", "2.00", "1/2", "25%"],
        ["900", "890", "64", "3", "1.000", "4.000", "3.00", "40.00", "2.00", "2.00", "1/1", "25%"],
    ]


def test_columns_are_under_their_heads() -> None:
    head, *lines = depth.table(ROWS).splitlines()
    assert {len(line) for line in lines} == {len(head)}
    for name in ("depth", "tokens", "n_ctx_draft", "ms/round", "x first", "same", "others"):
        end = head.index(name) + len(name)
        assert all(line[end - 1] != " " and line[end : end + 1] in ("", " ") for line in lines)


class Parrot:
    """A target whose tokens are bytes, and which answers each message with its first word."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.target = self
        self.info = SimpleNamespace(add_bos=True, bos=1)

    def apply_chat_template(self, messages: list[dict[str, str]]) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        assert not add_special
        return list(text.encode())

    def run(self, *, messages: str, max_tokens: int) -> Any:
        self.asked.append(messages)
        return SimpleNamespace(text=messages.split()[0][:max_tokens])


def test_a_deeper_conversation_begins_with_the_shallower_and_fills_its_depth() -> None:
    parrot, last = Parrot(), read_prompts(7)
    found = depth.conversations(parrot, last, [300, 1000, 8000])  # type: ignore[arg-type]
    talks = list(found.values())
    assert all(longer[: len(shorter)] == shorter for shorter, longer in zip(talks, talks[1:]))
    for most, talk in found.items():
        lengths = [len(depth.tokens_of(parrot, talk, row["text"])) for row in last]  # type: ignore[arg-type]
        assert most - 300 < max(lengths) <= most  # no turn is longer
        assert [message["role"] for message in talk] == ["user", "assistant"] * (len(talk) // 2)
    assert len(set(parrot.asked)) == len(parrot.asked) == len(talks[-1]) // 2 + 1
    assert not {row["text"] for row in last} & {message["content"] for message in talks[-1]}
    kinds = {row["text"]: row["kind"] for row in read_prompts()}
    assert len({kinds[text] for text in parrot.asked[:7]}) == 7


def test_a_depth_that_the_prompts_do_not_fill_is_refused() -> None:
    with pytest.raises(ValueError, match=r"end at \d+ tokens, before --depths 90000; lower it"):
        depth.conversations(Parrot(), read_prompts(7), [300, 90000])  # type: ignore[arg-type]


def test_depths_are_measured_and_arms_see_the_same_prompts(files: Files, tmp_path: Path) -> None:
    target, draft = files.pair()
    out = tmp_path / "depth.jsonl"
    small = ["--n-max", 3, 7, 8, "--tokens", 8, "--prompts", 2, "--threads", 1, "--out", out]
    code, text, err = bench(
        "depth", "--target", target, "--draft", draft, "--depths", 1200, 200, "--n-ctx-draft", 64, 0, *small
    )
    assert code == 0, err
    first, *rows = records(out)
    assert set(first["files"]) == {"target", "draft"}
    arms = [(0, 0), (64, 3), (64, 7), (0, 3), (0, 7)]  # a block of 8 drafts no 8
    assert [(row["n_ctx_draft"], row["n_max"]) for row in rows] == 4 * arms  # interleaved
    assert [row["depth"] for row in rows] == [200] * 10 + [1200] * 10
    assert all(row["same"] and row["n_rounds"] + row["draft_n_accepted"] == row["predicted_n"] for row in rows)
    prompts = [row["n_prompt"] for row in rows]
    assert all(prompts[i : i + 5] == prompts[i : i + 1] * 5 for i in (0, 5, 10, 15))
    assert max(prompts[:10]) <= 200 < 700 < prompts[-1] <= 1200
    assert text == depth.table(rows) + "\n"
    assert bench("table", out)[1] == text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--depths", 2048], "2144 tokens are more than the 2048 of the target's training; lower --depths"),
        (["--depths", 20], r"--depths 20 is less than the \d+ tokens of a prompt; raise it"),
        (["--n-ctx-draft", 200], r"--n-ctx-draft 200 leaves 48 tokens to go back of the \d+ needed; give a multiple"),
        (["--n-ctx-draft", 128], "leaves 120 tokens to go back of the 200 needed"),  # prompts differ in length
        (["--n-ctx-draft", 256, "--tokens", 256], r"leaves 248 tokens to go back of the \d+ needed; lower --tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(files: Files, tmp_path: Path, options: list[Any], said: str) -> None:
    target, draft = files.pair()
    given = ["--target", target, "--draft", draft, "--out", tmp_path / "depth.jsonl", "--depths", 512]
    code, _, err = bench("depth", *given, *options)
    assert code == 1
    assert re.search(said, err.splitlines()[-1])
