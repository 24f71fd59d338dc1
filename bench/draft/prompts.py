"""Prompts of many kinds, made of patterns and words, and rendered by the target's own chat template."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomllib

from pyllama_dflash import Model

from ..records import read_prompts
from .config import Settings

SUBJECTS = Path(__file__).with_name("subjects.toml")
FIELD = re.compile(r"\{(\w+?)\d?\}")
NUMBERS = {"n": (2, 12), "m": (2, 9), "x": (10, 400), "y": (2, 99)}
HOLE = "\x01"  # where a turn's text goes in a rendered template
LONGEST = 5 / 9  # of a row, a prompt


class Prompter:
    """Makes prompts at random."""

    def __init__(self, chance: random.Random) -> None:
        found = tomllib.loads(SUBJECTS.read_text(encoding="utf-8"))
        self.patterns, self.words, self.chance = found["patterns"], found["words"], chance
        self.kept = {row["text"] for row in read_prompts()}  # to judge by, never to learn from

    def prompt(self, kind: str) -> str:
        """A user's message of a kind."""
        text = self.fill(self.chance.choice(self.patterns[kind]))
        if text in self.kept:
            return self.prompt(kind)
        return text + (self.chance.choice(self.patterns["after"]) if kind in ("chat", "story", "list", "code") else "")

    def fill(self, pattern: str) -> str:
        """Put words in a pattern's places: in {topic2} another than in {topic}; {n2} and the like go on a row."""
        first, step = self.chance.randrange(1, 20), self.chance.randrange(1, 12)
        filled: dict[str, str] = {}

        def word(match: re.Match[str]) -> str:
            name, whole = match[1], match[0][1:-1]
            if re.fullmatch(r"n[234]", whole) or (whole == "n" and "{n2}" in pattern):
                return str(first + step * (int(whole[1:] or 1) - 1))
            others = [text for hole, text in filled.items() if hole != whole and hole.rstrip("23") == name]
            while whole not in filled or filled[whole] in others:
                filled[whole] = self.word(name)
            return filled[whole]

        return FIELD.sub(word, pattern)

    def word(self, name: str) -> str:
        """Text for a place of a name."""
        if name in NUMBERS:
            return str(self.chance.randrange(*NUMBERS[name]))
        if name == "passage":
            return " ".join(self.fill("{sentence}") for _ in range(self.chance.randrange(2, 6)))
        if name == "misspelt":
            return self.misspell(self.fill("{passage}"))
        if name == "words":
            source = self.words[self.chance.choice(["goods", "ingredient", "place", "activity", "firstname", "object"])]
            return ", ".join(self.chance.sample(source, min(len(source), self.chance.randrange(4, 10))))
        return self.fill(self.chance.choice(self.words[name]))

    def misspell(self, text: str) -> str:
        """Swap, drop or double a letter in some words."""
        words = text.split(" ")
        for index in self.chance.sample(range(len(words)), max(1, len(words) // 6)):
            word = words[index]
            if len(word) > 3:
                at = self.chance.randrange(1, len(word) - 2)
                change = self.chance.choice([word[at + 1] + word[at], word[at], word[at] * 2 + word[at + 1]])
                words[index] = word[:at] + change + word[at + 2 :]
        return " ".join(words)


@dataclass(frozen=True)
class Turns:
    """Tokens between turns, taken from the chat template.

    Attributes:
        end: token that ends a turn.
        reply: tokens from the end of a user's turn, `end` not included, to the start of the reply.
        user: tokens from the end of a reply, `end` not included, to the start of the user's text.
    """

    end: int
    reply: list[int]
    user: list[int]
    path: Path

    @classmethod
    def of(cls, path: Path) -> Turns:
        """Read them off a rendered dialogue.

        Raises:
            ValueError: the template does not end a turn by the model's end-of-generation token.
        """
        with Model(path) as model:
            roles = ("user", "assistant", "user")
            messages = [{"role": role, "content": f"{HOLE}{index}{HOLE}"} for index, role in enumerate(roles)]
            text = model.apply_chat_template(messages)
            between = [text.split(f"{HOLE}{index}{HOLE}")[1].split(HOLE)[0] for index in range(2)]
            tokens = [model.tokenize(part, add_special=False) for part in between]
            if not model.is_eog(tokens[0][0]) or tokens[0][0] != tokens[1][0]:
                raise ValueError(f"{path}: its chat template does not end turns by an end-of-generation token")
            return cls(tokens[0][0], tokens[0][1:], tokens[1][1:], path)

    def show(self, round: dict[str, Any], n: int = 10) -> None:
        """Print the beginnings of a round's first rows."""
        with Model(self.path) as model:
            for row in round["tokens"][:n]:
                print("---", repr(model.detokenize(row.tolist(), special=True)[:500]), flush=True)


class Feeder:
    """Prompts as tokens, a round at a time."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self.settings, self.chance, self.model = settings, random.Random(seed), Model(settings.target)  # noqa: S311
        self.prompter = Prompter(self.chance)
        messages = [{"role": "user", "content": HOLE}]
        self.frames = {}
        for system in set(self.prompter.patterns["system"]):
            told = [{"role": "system", "content": system}] if system else []
            self.frames[system] = self.model.apply_chat_template([*told, *messages]).split(HOLE)

    def round(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Prompts int64 [R, T], -1 after their ends; kinds uint8 [R]; whether the reply is next, bool [R]."""
        text = self.settings.text
        kinds = list(text.kinds)
        given = np.full((text.rows, text.length), -1, np.int64)
        kind = self.chance.choices(range(len(kinds)), list(text.kinds.values()), k=text.rows)
        for row, index in enumerate(kind):
            before, after = self.frames[self.chance.choice(self.prompter.patterns["system"])]
            if kinds[index] == "turn":
                whole = before + self.chance.choice(self.prompter.patterns["stems"])
            else:
                whole = before + self.prompter.prompt(kinds[index]) + after
            tokens = self.model.tokenize(whole)[: int(text.length * LONGEST)]
            given[row, : len(tokens)] = tokens
        replying = np.array([kinds[index] != "turn" for index in kind])
        return given, np.array(kind, np.uint8), replying

    @classmethod
    def serve(cls, settings: Settings, seed: int, queue: Any) -> None:
        """Put rounds in a queue for ever."""
        feeder = cls(settings, seed)
        while True:
            queue.put(feeder.round())
