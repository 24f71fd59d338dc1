"""A wrong command line is one line on stderr and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllama_dflash.__main__ import main

LINES = {
    "no command": "",
    "unknown command": "walk",
    "no prompt": "run -m {t}",
    "prompt and file": "run -m {t} -p a -f b",
    "no target": "run -p a",
    "empty target": "run -m  -p a",
    "empty draft": "run -m {t} -md  -p a",
    "demo and target": "run --demo -m {t} -p a",
    "demo and draft": "run --demo -md {d} -p a",
    "raw and system": "run -m {t} -p a --raw -sys b",
    "empty prompt": "run -m {t} --raw -p ",
    "unknown option": "run -m {t} -p a --seed 1",
    "shortened option": "run -m {t} -p a --margi 1",
    "shortened option with one dash": "info {t} -t 1",
    "shortened switch with one dash": "run -m {t} -p a -kv",
    "option of a draft, no draft": "info {t} -ctkd q8_0",
    "device of a draft, no draft": "info {t} -devd CPU",
    "n text": "run -m {t} -p a -n x",
    "n negative": "run -m {t} -p a -n -1",
    "n huge": "run -m {t} -p a -n 9999999999",
    "n float": "run -m {t} -p a -n 1.5",
    "device": "run -m {t} -p a -dev CUDA99",
    "device of the draft": "run -m {t} -md {d} -p a -devd CUDA99",
    "no device": "run -m {t} -p a -dev ,",
    "split mode": "run -m {t} -p a -sm rows",
    "main gpu": "run -m {t} -p a -sm none -mg 99",
    "tensor split": "run -m {t} -p a -ts 0,0",
    "tensor split text": "run -m {t} -p a -ts a,b",
    "n_max without draft": "run -m {t} -p a --n-max 3",
    "ctx negative": "run -m {t} -p a -c -1",
    "ctx huge": "run -m {t} -p a -c 2147483647",
    "threads 0": "run -m {t} -p a -t 0",
    "ubatch 0": "run -m {t} -p a -ub 0",
    "layers": "run -m {t} -p a -ngl -2",
    "flash": "run -m {t} -p a -fa maybe",
    "type": "run -m {t} -p a -ctk f17",
    "margin nan": "run -m {t} -md {d} -p a --margin nan",
    "margin negative": "run -m {t} -md {d} -p a --margin -1",
    "p_min": "run -m {t} -md {d} -p a --p-min 1.5",
    "n_max": "run -m {t} -md {d} -p a --n-max 8",
    "n_min": "run -m {t} -md {d} -p a --n-min 8",
    "margin without draft": "run -m {t} -p a --margin 1",
    "stop empty": "run -m {t} -p a --stop ",
    "batch of nothing": "batch -m {t}",
    "batch to nowhere": "batch {t} -m {t}",
    "batch without a target": "batch {t} -o -",
    "batch with a prompt": "batch {t} -o - -m {t} -p a",
    "none side by side": "batch {t} -o - -m {t} -np 0",
    "info of nothing": "info",
    "info of two": "info {t} {d}",
    "version of it": "version 3",
}


@pytest.mark.parametrize("name", LINES)
def test_command_line(
    pair: tuple[Path, Path], name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyllama_dflash._cli_common.show_logs", lambda verbosity: None)  # its handlers would stay
    words = [word.format(t=pair[0], d=pair[1]) for word in LINES[name].split(" ") if LINES[name]]
    try:
        code = main(words)
    except SystemExit as error:  # argparse
        code = int(str(error.code))
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    assert "error: " in err.splitlines()[-1]
    assert "Traceback" not in err
