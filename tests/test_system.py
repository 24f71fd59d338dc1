"""What the operating system may do to a process: fork it, refuse threads or memory, run it on a small stack."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

import child
import pytest
from laws import Models
from tiny import Draft, Files, Target

import pyllama_dflash as pd

unix = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and rlimits")


@unix
def test_a_child_process_is_told_to_open_anew(models: Models) -> None:
    spec = models.get(Target(), Draft(), n_threads=2)
    spec.run("the quick", max_tokens=4)
    read, write = os.pipe()
    process = os.fork()
    if not process:
        try:
            spec.run("the quick", max_tokens=4)
        except pd.ClosedError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert "before a fork" in answer.read()
    os.waitpid(process, 0)
    assert spec.run("the quick", max_tokens=4).tokens


@unix
@pytest.mark.parametrize("idle", [0, 0.5], ids=["threads awake", "threads asleep"])
@pytest.mark.parametrize("end", ["close", "drop", "after another"])
def test_a_child_process_may_end_what_its_parent_opened(models: Models, end: str, idle: float) -> None:
    spec = models.fresh(Target(), Draft(), n_threads=2)
    said = spec.run("the quick", max_tokens=4).tokens
    time.sleep(idle)
    process = os.fork()
    if not process:
        signal.alarm(20)  # ends a child that hangs
        if end == "after another":
            with models.fresh(Target(), Draft(), n_threads=2) as other:
                assert other.run("the quick", max_tokens=4).tokens == said
        if end != "drop":
            spec.close()
        del spec
        gc.collect()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7
    with spec:
        assert spec.run("the quick", max_tokens=4).tokens == said


@pytest.mark.skipif("SANITIZE" in pd.build_info()["options"], reason="instrumented frames are larger")
def test_a_thread_with_a_small_stack_runs(models: Models) -> None:
    said: list[tuple[int, ...]] = []
    spec = models.get(Target(), Draft(), n_threads=1, flash_attn="on")
    before = threading.stack_size(96 << 10)
    try:
        thread = threading.Thread(target=lambda: said.append(spec.run("the quick", max_tokens=20).tokens))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert said == [spec.run("the quick", max_tokens=20).tokens]


@pytest.mark.parametrize("pre", ["gpt-2", "default", "deepseek-llm", "gpt-4o", "tekken"])
@pytest.mark.parametrize("text", ["a" * 200_000, "!" * 200_000, " " * 200_000], ids=["letters", "marks", "spaces"])
def test_a_long_run_of_one_kind_of_character_is_tokenized(tmp_path: Path, pre: str, text: str) -> None:
    file = Target().file()
    file.keys["tokenizer.ggml.pre"] = pre
    with pd.Model(file.write(tmp_path / "target.gguf")) as model:
        assert model.detokenize(model.tokenize(text)) == text


def test_a_text_too_long_to_tokenize_is_refused(models: Models) -> None:
    with pytest.raises(ValueError, match="at most 4194304"):
        models.get(Target()).target.tokenize("a" * (1 << 22) + "a")


def test_two_models_that_check_each_other_do_not_wait_for_ever(files: Files) -> None:
    with pd.Model.header(files.path(Target())) as target, pd.Model.header(files.path(Draft())) as draft:

        def both_ways(a: pd.Model, b: pd.Model) -> None:
            for _ in range(2000):
                try:
                    a.check_pair(b)
                except pd.IncompatibleModelsError:
                    continue

        threads = [threading.Thread(target=both_ways, args=pair) for pair in ((target, draft), (draft, target))]
        for thread in threads:
            thread.daemon = True
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)


@unix
def test_memory_that_runs_short_after_opening_does_not_end_the_process(pair: tuple[Path, Path]) -> None:
    code = """
        import resource, sys, pyllama_dflash as pd
        spec = pd.Speculator(*sys.argv[1:], n_threads=1, n_ctx=512)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20),) * 2)
        for n_max in (1, 2, 3, 4, 5):
            try:
                spec.run("the quick", max_tokens=8, n_max=n_max)
            except (MemoryError, pd.DFlashError) as error:
                print(type(error).__name__)
        print("alive")
    """
    assert child.output(code, *pair).split()[-1] == "alive"


@unix
def test_threads_that_cannot_be_started_are_an_error(pair: tuple[Path, Path]) -> None:
    code = """
        import resource, sys, pyllama_dflash as pd
        target, draft = map(pd.Model, sys.argv[1:])
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 40, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20),) * 2)
        try:
            pd.Speculator(target, draft, n_threads=400, n_ctx=512)
        except MemoryError as error:
            print("threads" in str(error))
    """
    assert child.output(code, *pair).split() == ["True"]
