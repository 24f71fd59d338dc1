"""The command line as a shell sees it: what goes to stdout, what to stderr, and the exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import child
import pytest
from shell import cli, fails, unread
from tiny import N_VOCAB, Draft, Files

import pyllama_dflash as pd
from pyllama_dflash._cli_options import SWITCHES, VALUES

Pair = tuple[Path, Path]
SMALL = ("-c", "128", "-t", "1", "-n", "8", "--ignore-eos")


@pytest.fixture(scope="module")
def other(files: Files) -> Path:
    """A draft that reads a layer which the target of `pair` does not have."""
    return files.path(Draft(layers=(1, 7)))


@pytest.mark.parametrize("command", ["", "run", "batch", "info", "quantize", "convert", "version"])
def test_help(command: str) -> None:
    done = cli(*command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: pyllama-dflash" in done.stdout
    assert "--help" in done.stdout
    if command == "run":
        for name in ("n_max", "margin", "flash_attn"):
            assert pd.Params.__dataclass_fields__[name].metadata["help"][:20] in done.stdout
    for word in re.findall(r"\w+\(\)|\b[a-z]+_[a-z_]+\b", done.stdout):  # Python's names say nothing to a shell
        assert word in ("n_tokens", "max_tokens", "finish_reason", "run()", "attn_v", "ffn_down", "selector_hidden"), (
            word
        )


def test_no_command() -> None:
    done = cli()
    assert (done.returncode, done.stdout) == (2, "")
    assert "COMMAND" in done.stderr


# info and version -----------------------------------------------------------------------------------------------------


def test_info_of_a_target(pair: Pair) -> None:
    done = cli("info", pair[0])
    assert (done.returncode, done.stderr) == (0, "")
    rows = dict(line.split("  ", 1) for line in done.stdout.partition("\n\n")[0].splitlines())
    assert rows["file"].strip() == str(pair[0])
    assert rows["kind"].strip().startswith("target")
    assert str(N_VOCAB) in rows["vocabulary"]
    assert "block" not in rows


def test_info_of_a_draft_as_json(pair: Pair) -> None:
    done = cli("info", pair[1], "--json")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert (facts["kind"], facts["block_size"], facts["target_layers"]) == ("dflash2", 8, [1, 0])
    assert "pairs" not in facts


def test_info_of_a_pair(pair: Pair, other: Path) -> None:
    good = cli("info", pair[1], "--target", pair[0], "--json")
    assert (good.returncode, json.loads(good.stdout)["pairs"]) == (0, True)
    bad = cli("info", other, "--target", pair[0], "--json")
    facts = json.loads(bad.stdout)
    assert (bad.returncode, bad.stderr, facts["pairs"]) == (1, "", False)
    (reason,) = facts["mismatches"]
    assert "reads the input of layer 7" in reason
    assert f"pairs with target   no: {reason}" in cli("info", other, "--target", pair[0]).stdout


def test_info_of_what_a_pair_would_take(pair: Pair) -> None:
    small, large = (
        json.loads(cli("info", pair[0], "--draft", pair[1], "--json", "-c", n).stdout) for n in ("512", "1024")
    )
    assert (small["pairs"], small["draft"]) == (True, str(pair[1]))
    for kind, factor in (("target_kv", 2), ("draft_kv", 1025 / 513), ("target_weights", 1)):  # a spare cell
        taken, before = (found["memory"]["devices"][-1][kind] for found in (large, small))
        assert taken == pytest.approx(factor * before)
        assert before > 0
    other = json.loads(cli("info", pair[1], "--target", pair[0], "--json", "-c", "512", "-ctk", "q8_0").stdout)
    assert other["memory"]["devices"][-1]["target_kv"] < small["memory"]["devices"][-1]["target_kv"]
    assert other["memory"]["n_ctx"] == 512
    lines = cli("info", pair[0], "--draft", pair[1], "-c", "512").stdout.splitlines()
    title = next(i for i, line in enumerate(lines) if line.startswith("memory at n_ctx=512"))
    assert lines[title].split()[-1] == "free"
    assert [line.split()[0] for line in lines[title + 1 :]] == [row["device"] for row in small["memory"]["devices"]]
    assert lines[-1].endswith(("GiB", "MiB"))


def test_info_of_a_draft_alone_knows_its_weights_only(pair: Pair) -> None:
    row = json.loads(cli("info", pair[1], "--json").stdout)["memory"]["devices"][-1]
    assert row["draft_weights"] > 0 == row["target_weights"] == row["draft_kv"] == row["draft_compute"]
    assert "--ubatch-size=64 has no effect on a draft alone" in fails(2, "info", pair[1], "-ub", "64")
    assert "not both" in fails(2, "info", pair[1], "--target", pair[0], "--draft", pair[1])
    assert "--cache-type-k='f17'" in fails(2, "info", pair[0], "-ctk", "f17")


def test_info_of_a_damaged_file(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(pair[0].read_bytes()[:5000])
    assert str(path) in fails(1, "info", path)
    assert str(path) in fails(1, "info", pair[1], "--target", path)
    assert "gone.gguf" in fails(1, "info", tmp_path / "gone.gguf")


def test_version() -> None:
    done = cli("version", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert {name: facts[name] for name in pd.build_info()} == pd.build_info()
    assert [device["name"] for device in facts["devices"]] == [device.name for device in pd.devices()]
    assert facts["version"] in cli("version").stdout


# run ------------------------------------------------------------------------------------------------------------------


def test_run_is_what_run_returns(pair: Pair) -> None:
    done = cli("run", "-m", pair[0], "-md", pair[1], "-p", "the", "--raw", "--json", *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    with pd.Speculator(*pair, n_ctx=128, n_threads=1) as spec:
        wanted = spec.run("the", max_tokens=8, ignore_eos=True)
    assert set(found) == {"text", "tokens", "finish_reason", "stats", "memory"}
    assert found["memory"]["total"]["draft_kv"] == sum(row["draft_kv"] for row in found["memory"]["devices"]) > 0
    assert (found["text"], tuple(found["tokens"]), found["finish_reason"]) == (wanted.text, wanted.tokens, "length")
    assert set(found["stats"]) == set(wanted.stats.to_dict())
    assert found["stats"]["histogram"] == list(wanted.stats.histogram)
    done = cli("run", "-m", pair[0], "-md", pair[1], "-p", "the", "--raw", *SMALL)
    assert (done.returncode, done.stdout) == (0, wanted.text + "\n")
    speed, prompt = done.stderr.splitlines()
    assert "8 tokens in " in speed
    assert f"mean_len {wanted.stats.mean_len:.2f}, acceptance {wanted.stats.acceptance:.2f}" in speed
    assert prompt.startswith("prompt: 2 tokens in ")


def test_prompts_are_the_same_however_given(pair: Pair, tmp_path: Path) -> None:
    prompt = "the owl …\n"
    path = tmp_path / "prompt.txt"
    path.write_text(prompt, encoding="utf-8")
    run = ("run", "-m", pair[0], "--json", *SMALL)
    given = [cli(*run, "-p", prompt), cli(*run, "-f", path), cli(*run, "-f", "-", text=prompt)]
    assert [done.returncode for done in given] == [0, 0, 0]
    assert len({tuple(json.loads(done.stdout)["tokens"]) for done in given}) == 1
    with pd.Speculator(pair[0], n_ctx=128, n_threads=1) as spec:
        wanted = spec.run(messages=prompt, max_tokens=8, ignore_eos=True).tokens
    assert tuple(json.loads(given[0].stdout)["tokens"]) == wanted


def test_prompt_that_is_no_text(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in fails(2, "run", "-m", pair[0], "-f", path)
    gone = tmp_path / "gone.txt"
    assert f"error: {gone}: no such file or directory\n" in fails(1, "run", "-m", pair[0], "-f", gone)
    assert f"error: {tmp_path}: is a directory\n" in fails(1, "run", "-m", pair[0], "-f", tmp_path)
    assert "no tokens" in fails(2, "run", "-m", pair[0], "--raw", "-f", "-", text="")


def test_no_draft(pair: Pair) -> None:
    run = ("run", "-m", pair[0], "-md", pair[1], "-p", "the", "--json", *SMALL)
    plain = json.loads(cli(*run, "--no-draft", "--margin", "1").stdout)
    assert plain["stats"]["draft_n"] == 0
    assert plain["tokens"] == json.loads(cli("run", "-m", pair[0], "-p", "the", "--json", *SMALL).stdout)["tokens"]


def test_the_reference_graph(pair: Pair) -> None:
    run = ["run", "-m", pair[0], "-md", pair[1], "--raw", "-p", "the quick", "-n", "24"]
    ours, reference = cli(*run), cli(*run, "--no-fused-draft")
    assert ours.stdout == reference.stdout != ""
    alone = ["run", "-m", pair[0], "--raw", "-p", "the", "--no-fused-draft"]
    assert "--no-fused-draft has no effect without a draft" in fails(2, *alone)


def test_failures(pair: Pair, other: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    assert "gone.gguf" in fails(1, "run", "-m", tmp_path / "gone.gguf", "-p", "a")
    assert str(text) in fails(1, "run", "-m", pair[0], "-md", text, "-p", "a")
    assert "7" in fails(1, "run", "-m", pair[0], "-md", other, "-p", "a")
    assert "draft" in fails(1, "run", "-m", pair[1], "-p", "a")
    assert "--ctx-size=16; shorten it" in fails(1, "run", "-m", pair[0], "-p", "the owl " * 50, "-c", "16")
    assert "--n-max=8 exceeds block_size-1=7" in fails(
        2, "run", "-m", pair[0], "-md", pair[1], "-p", "a", "--n-max", "8"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-ctk f17", "--cache-type-k='f17' is not a type"),
        ("-n -1", "--n-predict=-1 is below 0; raise --n-predict"),
        ("-dev CUDA99", "--device='CUDA99' is no device; there are: "),
        ("-ub 70000", "--ubatch-size=70000 is out of range"),
        ("--n-max 3", "--n-max=3 has no effect without a draft; give one by -md"),
        ("--margin 2", "--margin=2.0 has no effect without a draft"),
    ],
)
def test_a_message_names_the_flag(pair: Pair, flags: str, message: str) -> None:
    assert message in fails(2, "run", "-m", pair[0], "-p", "a", *flags.split())


def test_a_path_in_a_message_stays_as_it_is(tmp_path: Path) -> None:
    assert "/n_max/n_ctx.gguf: no such file" in fails(1, "run", "-m", tmp_path / "n_max" / "n_ctx.gguf", "-p", "a")


def test_each_option_has_a_flag() -> None:
    one_reply = set(pd.Params.__dataclass_fields__) - {"cache_ram"}  # which is for the next prompts
    assert {*VALUES, *SWITCHES} == one_reply


def test_flags_of_devices_and_loading(pair: Pair) -> None:
    run = ("run", "-m", pair[0], "-md", pair[1], "-p", "the", "--json", *SMALL)
    flags = ("-dev", "CPU", "-devd", "CPU", "-sm", "none", "-mg", "0", "--no-mmap", "--mlock", "-kvu")
    assert json.loads(cli(*run, *flags).stdout)["tokens"] == json.loads(cli(*run).stdout)["tokens"]


def test_logs_on_request(pair: Pair) -> None:
    run = ("run", "-m", pair[0], "-p", "the", "--json", *SMALL)
    loud = cli(*run, "-vv")
    assert loud.returncode == 0
    assert "pyllama-dflash: INFO: llama_model_loader" in loud.stderr
    assert "DEBUG" not in loud.stderr
    some = cli(*run, "-v").stderr
    assert "pyllama-dflash: INFO: memory on CPU: weights " in some
    assert some.count("\n") < 10
    assert "llama_model_loader" not in some
    assert json.loads(loud.stdout)["tokens"] == json.loads(cli(*run).stdout)["tokens"]


def test_warning_is_shown(pair: Pair) -> None:
    done = cli("run", "-m", pair[0], "-p", "the", "-ngl", "3", "-dev", "CPU", *SMALL)
    assert "WARNING: n_gpu_layers=3 has no effect: devices='CPU' takes no GPU" in done.stderr
    if pd.supports_gpu():
        pytest.skip("there is a GPU")
    done = cli("run", "-m", pair[0], "-p", "the", "-ngl", "3", "--cuda-graphs", "on", *SMALL)
    assert done.returncode == 0
    assert "WARNING: n_gpu_layers=3 has no effect: there is no GPU" in done.stderr
    assert "WARNING: cuda_graphs='on' has no effect: there is no GPU" in done.stderr


def test_a_refused_lock_is_shown_without_a_flag_and_rows_of_dots_never() -> None:
    code = """
        import logging, sys
        from pyllama_dflash import _cli_common, _ffi, _log
        sys.stderr = sys.stdout
        _cli_common.show_logs(0)
        lines = ["warning: failed to mlock 5-byte buffer", "......", "Try increasing RLIMIT_MEMLOCK", "other"]
        waiting = [(3, False, line) for line in lines]
        _ffi.log_next = lambda: waiting.pop(0) if waiting else None
        seen = []
        _log.llama_cpp.addFilter(lambda record: seen.append(record.getMessage()) or True)
        _log.drain()
        assert "......" not in seen and "other" in seen
    """
    said = child.output(code).splitlines()
    assert [line.split(": ")[2] for line in said] == ["warning", "Try increasing RLIMIT_MEMLOCK"]


def test_a_library_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("not a library")
    for name, reason in (("gone.so", "is not a file"), ("text.so", "cannot be loaded")):
        library = tmp_path / name
        if sys.version_info >= (3, 10):  # before, python -m does not say what it runs
            assert reason in fails(1, "version", env={**os.environ, "PYLLAMA_DFLASH_LIBRARY": str(library)})
        program = tmp_path / "pyllama-dflash"  # as pip writes it
        program.write_text("import sys\nfrom pyllama_dflash.__main__ import main\nsys.exit(main())\n")
        paths = {"PYLLAMA_DFLASH_LIBRARY": str(library), "PYTHONPATH": str(Path(pd.__file__).parents[1])}
        environment = {**os.environ, **paths}
        done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, env=environment)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert reason in done.stderr


# surroundings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coerced", [True, False])
def test_locale_without_unicode(pair: Pair, coerced: bool) -> None:
    """Text that the locale cannot show comes out as UTF-8 all the same."""
    surroundings = {
        name: os.environ[name] for name in os.environ if not name.startswith(("LC_", "PYTHONIO", "PYTHONUTF8"))
    }
    surroundings |= {"LANG": "C", "LC_ALL": "C"}
    if not coerced:  # Python would else take UTF-8 for such a locale
        surroundings |= {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    run = ("run", "-m", pair[0], "--raw", "-p", "the", *SMALL, "-n", "40")
    there, here = cli(*run, env=surroundings), cli(*run)
    assert (there.returncode, here.returncode) == (0, 0)
    assert there.stdout == here.stdout
    assert not here.stdout.isascii()


def test_another_folder(pair: Pair, tmp_path: Path) -> None:
    """Paths are the caller's, and a module of the caller's folder does not get in the way."""
    for path, name in zip(pair, ("target.gguf", "dräft …\u2028.gguf")):
        (tmp_path / name).symlink_to(path)
    done = cli("run", "-m", "target.gguf", "-md", "dräft …\u2028.gguf", "-p", "the", "--json", *SMALL, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    info = json.loads(cli("info", "./dräft …\u2028.gguf", "--json", cwd=tmp_path).stdout)
    assert info["file"] == "./dräft …\u2028.gguf"


@pytest.mark.parametrize("args", [("--json",), ()], ids=["json", "text"])
def test_reader_that_leaves(pair: Pair, args: tuple[str, ...]) -> None:
    """As with `| head -c 0`: no complaint, the exit code that a shell gives for SIGPIPE."""
    assert unread("run", "-m", pair[0], "-p", "the", *SMALL, *args) == (141, "")


def test_installed_command() -> None:
    """The script that pip installs is the same program."""
    script = Path(sys.executable).with_name("pyllama-dflash")
    if not script.exists():
        pytest.skip("the package is not installed in this environment")
    done = subprocess.run([script, "version", "--json"], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["version"] == pd.__version__
