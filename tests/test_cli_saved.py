"""The run command's --save and --load: a text goes on in another process, and what does not fit is refused."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import child
import pytest
from laws import Models
from shell import cli, fails
from test_limits import FAIR, N_MAX, prompt_before, right, said_from, stub  # noqa: F401 - stub is a fixture
from tiny import SAID, Draft, Files, Target

import pyllama_dflash as pd
from pyllama_dflash import _cli_saved, _ffi_engine
from pyllama_dflash.__main__ import main

SMALL = ("-c", "256", "-t", "1", "-n", "8")
PROMPT = "the owl and the cat sat in the sun"
TARGET, DRAFT = Target(weights="Q8_0"), Draft()  # rows do not depend on the width of a batch


@pytest.fixture(scope="module")
def run(files: Files) -> tuple[Any, ...]:
    """The start of a command line."""
    return ("run", "-m", files.path(TARGET), "-md", files.path(DRAFT), *SMALL)


@pytest.fixture(scope="module")
def opened(files: Files) -> Iterator[pd.Speculator]:
    with pd.Speculator(files.path(TARGET), files.path(DRAFT), n_ctx=256, n_threads=1) as spec:
        yield spec


@pytest.fixture
def spec(opened: pd.Speculator) -> pd.Speculator:
    opened.reset()
    return opened


def said(*args: Any) -> tuple[list[int], int, int]:
    """Tokens of a reply, and of its prompt those evaluated and those that were there."""
    done = cli(*args, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    return found["tokens"], found["stats"]["prompt_n"], found["stats"]["prompt_n_cached"]


# the round trip -------------------------------------------------------------------------------------------------------


def test_a_text_goes_on(run: tuple[Any, ...], spec: pd.Speculator, alone: Path) -> None:
    """With what --raw adds to it, and then as it is; each reply is that of the text in one process."""
    file = alone / "text"
    text: list[int] = []
    for flags, more in (
        (("--raw", "-p", PROMPT), spec.target.tokenize(PROMPT)),
        (("--raw", "-p", " then", "--load", file), spec.target.tokenize(" then", add_special=False)),
        (("--load", file), []),
    ):
        n_there = max(0, len(text) - 1)
        text += more
        reply, *counts = said(*run, *flags, "--ignore-eos", "--save", file)
        assert counts == [len(text) - n_there, n_there]
        assert tuple(reply) == spec.run(text, max_tokens=8, ignore_eos=True).tokens
        text += reply
    assert spec.load(file) == tuple(text)


def test_a_conversation_goes_on(run: tuple[Any, ...], spec: pd.Speculator, alone: Path) -> None:
    """The prompt is the user's next turn, as the template has it after a reply."""
    first, n_new, _ = said(*run, "-p", "the owl", "--save", alone / "text")
    second, *counts = said(*run, "-p", "and a cat?", "--load", alone / "text", "--save", alone / "text")
    assert counts[1] == n_new + len(first) - 1
    text = spec.load(alone / "text")[: sum(counts)]
    turns = (("user", "the owl"), ("assistant", spec.target.detokenize(first)), ("user", "and a cat?"))
    whole = spec.target.apply_chat_template([{"role": role, "content": content} for role, content in turns])
    assert spec.target.detokenize(text, special=True) == whole
    spec.reset()
    assert tuple(second) == spec.run(text, max_tokens=8).tokens


def test_a_prompt_for_later(run: tuple[Any, ...], spec: pd.Speculator, alone: Path) -> None:
    _, n_prompt, _ = said(*run, "-p", PROMPT, "-n", "0", "--save", alone / "text")
    reply, *counts = said(*run, "--load", alone / "text")
    assert counts == [1, n_prompt - 1]
    assert tuple(reply) == spec.run(messages=PROMPT, max_tokens=8).tokens


def test_figures_say_how_much_was_there(run: tuple[Any, ...], spec: pd.Speculator, alone: Path) -> None:
    args = ("-p", PROMPT, "--raw", "--ignore-eos", "--save", alone / "text")
    assert "there" not in cli(*run, *args).stderr
    n_there = len(spec.target.tokenize(PROMPT)) + 8 - 1
    figures = cli(*run, "--load", alone / "text", "--ignore-eos").stderr.splitlines()[1]
    assert figures.startswith("prompt: 1 token in ")
    assert figures.endswith(f"; {n_there} were there")


def test_a_prompt_comes_from_a_file_too(run: tuple[Any, ...], alone: Path) -> None:
    said(*run, "-p", PROMPT, "--raw", "--ignore-eos", "--save", alone / "text")
    load = (*run, "--raw", "--load", alone / "text", "--json")
    here, stdin = cli(*load, "-p", " then"), cli(*load, "-f", "-", text=" then")
    assert json.loads(here.stdout)["tokens"] == json.loads(stdin.stdout)["tokens"] != []


# the end of a reply ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", range(N_MAX + 3))
def test_tokens_after_a_reply_are_not_saved(
    models: Models,
    stub: Any,  # noqa: F811
    alone: Path,
    offset: int,
) -> None:
    """Of the block that has the end, those after it were accepted; an end-of-generation token is part of the text."""
    start = 20 - offset
    stub(right(start))
    spec, prompt = models.get(Target(wobble=0.0, eos=SAID[20]), FAIR), prompt_before(start)
    for stop, end in ((None, (SAID[20],)), (["…"], ())):
        reply = spec.run(prompt, max_tokens=60, stop=stop, ignore_eos=bool(stop)).tokens
        assert reply == said_from(start, len(reply))
        _cli_saved.save(spec, str(alone / "text"), len(prompt) + len(reply))
        assert spec.load(alone / "text") == (*prompt, *reply, *end)


def test_after_a_reply_that_ended_a_prompt_is_needed(files: Files, alone: Path) -> None:
    target, file = files.path(Target(wobble=0.0, eos=SAID[3])), alone / "text"
    run = ("run", "-m", target, *SMALL, "--raw")
    with pd.Speculator(target, n_ctx=256, n_threads=1) as spec:
        words = spec.target.detokenize([SAID[0]])
        assert said(*run, "-p", words, "--save", file)[0] == SAID[1:3]
        assert spec.load(file)[-3:] == tuple(SAID[1:4])
        message = f"{file} ends with a reply's end; give a prompt by -p or -f, or --ignore-eos to go on"
        assert message in fails(2, *run[:-1], "--load", file)
        assert said(*run[:-1], "--load", file, "--ignore-eos")[0] == SAID[4:12]
        # Text takes the end's place.
        said(*run, "-p", spec.target.detokenize([SAID[7]]), "--load", file, "--save", file)
        text = spec.load(file)
        assert text[text.index(SAID[7]) - 3 : text.index(SAID[7]) + 2] == (*SAID[:3], *SAID[7:9])


def test_ctrl_c_saves_what_was_said(run: tuple[Any, ...], alone: Path) -> None:
    code = """
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from pyllama_dflash.__main__ import main
        sys.exit(main(sys.argv[1:]))
    """
    args = (*run, "--raw", "-p", PROMPT, "--ignore-eos", "-c", "2048", "-n", "2000", "--save", alone / "text")
    with subprocess.Popen(child.arguments(code, *args), stdout=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None
        out = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out += process.stdout.read()
        assert process.wait(timeout=60) == 130
    with pd.Speculator(run[2], run[4], n_ctx=2048, n_threads=1) as spec:
        text = spec.target.detokenize(spec.load(alone / "text"))
        assert text.startswith(PROMPT + out[:-1])
        assert len(text) <= len(PROMPT + out)  # a character may be unfinished


def test_half_a_prompt_is_not_saved(run: tuple[Any, ...], alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("pyllama_dflash._cli_common.show_logs", lambda verbosity: None)
    monkeypatch.setattr(_ffi_engine, "prefill", press)
    assert main([*map(str, run), "-p", PROMPT, "--save", str(alone / "text")]) == 130
    assert not list(alone.iterdir())


# what is refused ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(run: tuple[Any, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of --save."""
    file = tmp_path_factory.mktemp("saved") / "text"
    said(*run, "-p", PROMPT, "--raw", "--ignore-eos", "--save", file)
    return file


def test_flags_that_contradict_each_other(run: tuple[Any, ...], whole: Path) -> None:
    for flags, message in (
        ((), "there is no prompt; give one by -p or -f, or a text to go on with by --load"),
        (("--save", whole), "there is no prompt; "),
        (("--load", whole, "--raw"), "--raw has no effect without a prompt; give one by -p or -f, or leave it out"),
        (("--load", "", "-p", "a", "-sys", "b"), "-sys is for the start of a text"),
        (("--load", whole, "-p", "a", "-sys", "b"), "-sys is for the start of a text, which --load brings; leave one"),
    ):
        assert message in fails(2, *run, *flags)


def test_files_that_are_no_text(run: tuple[Any, ...], whole: Path, alone: Path) -> None:
    """Those that can be told by their first bytes are refused before any model is read."""
    (alone / "mine").write_text("something else")
    (alone / "bad").write_bytes(whole.read_bytes()[:-1])
    for run_ in (run, ("run", "-m", alone / "gone.gguf")):
        assert f"{alone / 'mine'} is none that --save wrote; give the path of one" in fails(
            1, *run_, "--load", alone / "mine"
        )
        assert f"{alone} is no file; give the path that --save wrote" in fails(1, *run_, "--load", alone)
        assert f"{alone / 'absent'}: no such file" in fails(1, *run_, "--load", alone / "absent")
        assert ". is no file; give the path that --save wrote" in fails(1, *run_, "--load", "")
    message = f"{alone / 'bad'} is damaged or cut short: its checksum is wrong; save the text anew"
    assert message in fails(1, *run, "--load", alone / "bad")


def test_places_that_are_none(run: tuple[Any, ...], alone: Path) -> None:
    """They are refused before the reply, not after it."""
    (alone / "mine").write_text("something else")
    for code, place, message in (
        (1, alone, f"{alone} is a directory; give the path of the file to write"),
        (1, "", ". is a directory; give the path of the file to write"),
        (1, alone / "a" / "b", f"there is no folder {alone / 'a'} for b; make it first"),
        (1, alone / "mine", f"{alone / 'mine'} is there already and is none that --save wrote; give another path"),
        (1, "/dev/null", "/dev/null is there and is no file; give another path"),
        (2, run[2], f"{run[2]} is one of the models itself; give another path"),
        (2, run[4], f"{run[4]} is one of the models itself; give another path"),
    ):
        assert message in fails(code, *run, "-p", "a", "--save", place)
    assert (alone / "mine").read_text() == "something else"


def test_a_place_that_turns_out_to_be_none(run: tuple[Any, ...]) -> None:
    """The reply is shown all the same."""
    done = cli(*run, "-p", "the", "--ignore-eos", "--save", "/proc/text")
    assert done.returncode == 1
    assert len(done.stdout) > 1
    assert done.stderr.splitlines()[-1].startswith("pyllama-dflash: error: ")
    assert "/proc/text" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_other_models_and_options(run: tuple[Any, ...], files: Files, whole: Path) -> None:
    target, draft = run[2], run[4]
    more = ("--load", whole, "-p", "a")
    for models, flags, message in (
        ((files.path(Target()), draft), (), "was saved with another target; open the target that it was saved with"),
        ((target, files.path(Draft(seed=1))), (), "was saved with another draft; open the draft that"),
        ((target, draft), ("--no-draft",), "was saved with a draft; open the draft that"),
        (
            (target, draft),
            ("-ctk", "q8_0"),
            "was saved with --cache-type-k='f16', this is --cache-type-k='q8_0': open with that",
        ),
        (
            (target, draft),
            ("--no-fused-draft",),
            "was saved with no --no-fused-draft, this is --no-fused-draft: open with that",
        ),
    ):
        assert f"{whole} {message}" in fails(2, "run", "-m", models[0], "-md", models[1], *SMALL, *more, *flags)


def test_a_context_that_is_too_small(run: tuple[Any, ...], whole: Path, spec: pd.Speculator) -> None:
    n = len(spec.load(whole))
    message = f"{whole} has {n - 1} tokens, --ctx-size={n - 2}; open with a larger --ctx-size"
    assert message in fails(1, *run, "--load", whole, "-c", str(n - 2), "--ignore-eos")
    message = f"the prompt has {n + 1} tokens, --ctx-size={n}; shorten it"
    assert message in fails(1, *run, "--load", whole, "-c", str(n), "--raw", "-p", "e")


def test_a_template_that_does_not_show_a_reply(files: Files, alone: Path, tmp_path: Path) -> None:
    file = TARGET.file()
    file.keys["tokenizer.chat_template"] = "{{ messages[0].content }}:"
    run = ("run", "-m", file.write(tmp_path / "target.gguf"), *SMALL, "--ignore-eos")
    said(*run, "-p", "a", "--save", alone / "text")
    message = "the chat template does not show what follows a reply; give the next turn as text, with --raw"
    assert message in fails(2, *run, "--load", alone / "text", "-p", "b")
    assert len(said(*run, "--load", alone / "text", "-p", "b", "--raw")[0]) == 8


def test_a_target_without_a_template(alone: Path, tmp_path: Path) -> None:
    file = TARGET.file()
    del file.keys["tokenizer.chat_template"]
    run = ("run", "-m", file.write(tmp_path / "target.gguf"), *SMALL, "--ignore-eos")
    said(*run, "-p", PROMPT, "--save", alone / "text")
    replies = [said(*run, "--load", alone / "text", "-p", " then", *raw) for raw in ((), ("--raw",))]
    assert replies[0] == replies[1]
