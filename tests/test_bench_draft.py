"""What a draft is trained on and by: the settings of a run, its prompts, the tokens between turns. No torch."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path

import numpy as np
import pytest
from benching import ROOT
from tiny import Target

import pyllama_dflash as pd

pytest.importorskip("tomllib")

from bench.draft import config
from bench.draft.prompts import FIELD, LONGEST, NUMBERS, Feeder, Prompter, Turns

SETTINGS = ROOT / "bench/draft/smollm2-135m.toml"
SEEDS = range(8)
HOLES = re.compile(r"\{(\w+)\}")


def prompter(seed: int = 0) -> Prompter:
    return Prompter(random.Random(seed))


PATTERNS = [(kind, text) for kind, found in prompter().patterns.items() for text in found]


def test_settings_are_read() -> None:
    made = config.read(SETTINGS, [])
    assert (made.name, made.target.suffix, made.variants) == (
        "SmolLM2-135M-Instruct DFlash2 draft",
        ".gguf",
        ["", "", "q4_0"],
    )
    assert (made.draft.block, made.draft.taps) == (8, [2, 10, 18, 25, 29])
    assert sum(made.text.kinds.values()) == pytest.approx(1)
    assert set(made.text.kinds) - {"turn"} <= set(prompter().patterns)


def test_a_change_is_laid_over_one_setting() -> None:
    changes = ["draft.block=16", "text.kinds.chat=0.5", 'target.path="a=b.gguf"', "train.peak_lr=1e-4"]
    made, plain = config.read(SETTINGS, changes), config.read(SETTINGS, [])
    assert (made.draft.block, made.text.kinds["chat"]) == (16, 0.5)
    assert (made.target, made.train.peak_lr) == (Path("a=b.gguf"), 1e-4)
    assert dataclasses.replace(made.draft, block=8) == plain.draft
    assert dataclasses.replace(made.train, peak_lr=2e-3) == plain.train


@pytest.mark.parametrize("key", ["draft.blocks", "drafts.block", "blocks", "name.S", "seed.block", "draft.block.x"])
def test_a_change_of_no_setting_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"there is no setting {key}$"):
        config.read(SETTINGS, [f"{key}=1"])


@pytest.mark.parametrize("change", ["train.quantised=none", "draft.block", "draft.block="])
def test_a_change_to_no_value_is_named(change: str) -> None:
    with pytest.raises(ValueError, match=re.escape(change.partition("=")[0]) + ".* is no TOML value"):
        config.read(SETTINGS, [change])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("\nblock = ", "\nblocks = ", r"\[draft\]: block, blocks are missing or unknown"),
        ("\nwarmup = 150", "", r"\[train\]: warmup is missing"),
        ("\nrows = 4096", "\nrows = 4096\ncolumns = 1", r"\[text\]: columns is missing or unknown"),
        ('\nlicense = "apache-2.0"', "", "settings: license is missing"),
        ("\nseed = 0", "\nseed = 0\nseeds = 1", "settings: seeds is missing or unknown"),
        ("\npath = ", "\nfile = ", r"\[target\]: file, path are missing"),
    ],
)
def test_a_wrong_key_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    text, file = SETTINGS.read_text(encoding="utf-8"), tmp_path / "settings.toml"
    assert text.count(old) == 1 or old == "\nrows = 4096"
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        config.read(file, [])


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in PATTERNS}))
def test_every_pattern_is_filled(kind: str) -> None:
    made = prompter()
    snippets = made.words["snippet"]
    for pattern in made.patterns[kind]:
        for _ in SEEDS:
            text = made.fill(pattern)
            assert not FIELD.search(text), pattern
            for snippet in snippets if "{snippet}" in pattern else ():
                text = text.replace(snippet, "")  # code has braces of its own
            assert "{" not in text, pattern
            assert "}" not in text, pattern


def test_every_word_is_filled() -> None:
    made = prompter()
    for name, words in made.words.items():
        for word in words:
            text = made.fill(word)
            assert name == "snippet" or not set("{}") & set(text), word


SEVERAL = [text for _, text in PATTERNS if len(HOLES.findall(text)) > 1] + [
    text for name, words in prompter().words.items() if name != "snippet" for text in words if text.count("{") > 1
]


def test_places_of_one_name_are_equal_and_of_others_are_not() -> None:
    """What differs in the number only is a different thing of the same sort."""
    made = prompter()
    made.words = {name: [f"<{name} {index}>" for index in range(4)] for name in made.words}
    assert len(SEVERAL) > 50
    for pattern in SEVERAL:
        holes = HOLES.findall(pattern)
        shape = re.compile("(.*?)".join(map(re.escape, HOLES.split(pattern)[::2])) + "$", re.DOTALL)
        for _ in range(20):
            found = shape.match(made.fill(pattern))
            assert found, pattern
            texts: dict[str, str] = {}
            for hole, text in zip(holes, found.groups()):
                assert texts.setdefault(hole, text) == text, pattern
            for sort in {hole.rstrip("234") for hole in holes}:
                same = [text for hole, text in texts.items() if hole.rstrip("234") == sort]
                assert len(set(same)) == len(same), pattern


def test_numbers_of_a_row_are_at_one_distance() -> None:
    for seed in SEEDS:
        row = list(map(int, prompter(seed).fill("{n} {n2} {n3} {n4}").split()))
        assert row[0] >= 1
        assert len(set(np.diff(row))) == 1
        assert row[1] > row[0]
    low, high = NUMBERS["x"]
    assert all(low <= int(prompter(seed).fill("{x}")) < high for seed in SEEDS)


def test_a_prompt_to_judge_by_is_never_learned_from() -> None:
    made = prompter()
    kept = "Why is the sky blue?"
    assert kept in made.kept
    made.patterns = {**made.patterns, "chat": [kept, "Why is {thing} {quality}?"]}
    made.words = {**made.words, "thing": ["the sky", "grass"], "quality": ["blue", "green"]}
    for _ in range(50):
        assert not made.prompt("chat").startswith(kept)
    made.kept = set()
    assert any(made.prompt("chat").startswith(kept) for _ in range(50))


def test_the_same_seed_makes_the_same_prompts() -> None:
    kinds = ["chat", "story", "code", "list", "data", "copy", "letter", "maths"]
    one, same, other = ([each.prompt(kind) for kind in kinds] for each in (prompter(3), prompter(3), prompter(4)))
    assert one == same != other


def test_misspelling_changes_a_sixth_of_the_words_and_keeps_their_ends() -> None:
    text = "nobody knew that nineteen friendly elephants walked along the river until it got dark yesterday"
    n_changed = []
    for seed in range(50):
        found = list(zip(text.split(" "), prompter(seed).misspell(text).split(" ")))
        changed = [(old, new) for old, new in found if old != new]
        n_changed.append(len(changed))
        assert len(found) == 15
        for old, new in changed:
            assert len(old) > 3
            assert (old[0], old[-1]) == (new[0], new[-1])
            assert abs(len(old) - len(new)) <= 1
    assert max(n_changed) == 15 // 6
    assert prompter().misspell("a") == "a"


@pytest.mark.model
def test_a_dialogue_is_the_tokens_of_its_parts(demo: tuple[Path, Path]) -> None:
    turns = Turns.of(demo[0])
    with pd.Model(demo[0]) as model:

        def ids(text: str) -> list[int]:
            return list(model.tokenize(text, add_special=False))

        asked, replied, more = "What is a tide?", "It is water that moves.", "Why does it move?"
        first = [{"role": "user", "content": asked}]
        further = [{"role": "assistant", "content": replied}, {"role": "user", "content": more}]
        start = ids(model.apply_chat_template(first).split(asked)[0])
        opened = [*start, *ids(asked), turns.end, *turns.reply]
        assert ids(model.apply_chat_template(first)) == opened
        whole = [*opened, *ids(replied), turns.end, *turns.user, *ids(more), turns.end, *turns.reply]
        assert ids(model.apply_chat_template([*first, *further])) == whole
        assert model.is_eog(turns.end)


def test_a_template_that_ends_turns_otherwise_is_refused(tmp_path: Path) -> None:
    file = Target().file()
    file.keys["tokenizer.chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}. {% endfor %}"
    with pytest.raises(ValueError, match="does not end turns by an end-of-generation token"):
        Turns.of(file.write(tmp_path / "target.gguf"))


@pytest.mark.model
def test_a_round_of_prompts(demo: tuple[Path, Path]) -> None:
    """Shapes, -1 after each prompt, none longer than it may be, stems of a user's turn where no reply is next."""
    small = [f'target.path="{demo[0]}"', "text.rows=200", "text.length=108"]
    settings = config.read(SETTINGS, small)
    most, turns = int(108 * LONGEST), Turns.of(demo[0])
    kinds = list(settings.text.kinds)
    feeder = Feeder(settings, 5)
    given, kind, replying = feeder.round()
    assert (given.shape, given.dtype) == ((200, 108), np.int64)
    assert (kind.shape, kind.dtype, replying.shape, replying.dtype) == ((200,), np.uint8, (200,), np.bool_)
    lengths = (given >= 0).sum(1)
    assert lengths.max() == most  # some were cut
    assert lengths.min() >= 3
    for row, n in zip(given, lengths):
        assert (row[:n] >= 0).all()
        assert (row[n:] == -1).all()
    assert (replying == (kind != kinds.index("turn"))).all()
    assert set(kind) == set(range(len(kinds)))
    whole = [row[:n].tolist() for row, n in zip(given[replying], lengths[replying]) if n < most]
    assert whole
    assert all(row[-len(turns.reply) - 1 :] == [turns.end, *turns.reply] for row in whole)
    open_turns = [row[:n].tolist() for row, n in zip(given[~replying], lengths[~replying])]
    assert not any(row[-len(turns.reply) :] == turns.reply for row in open_turns)
    again = Feeder(settings, 5).round()
    assert all((one == other).all() for one, other in zip((given, kind, replying), again))
