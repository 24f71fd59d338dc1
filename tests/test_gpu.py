"""What holds on the CPU holds on a CUDA device: the same tokens, and each row of a batch with its own argmax."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from laws import first_difference

import pyllama_dflash as pd
from pyllama_dflash import _open
from pyllama_dflash._open import engine_fields

PROMPTS = (
    "Write a Python function that returns the nth Fibonacci number.",
    "Why is the sky blue?",
    "Write a JSON array of five fruits with their colour and price.",
)
# The two devices sum in another order and round otherwise, through thirty layers; logits spread over some 4.5.
DEVICE_TIE = 1.0
WIDTH_TIE = 0.5  # of one device, between batches of one and of several rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.model,
    pytest.mark.skipif(not any(device.is_gpu for device in pd.devices()), reason="no GPU"),
]


def reply(demo: tuple[Path, Path], prompt: str, layers: int, **options: bool) -> pd.Result:
    sizes = {"n_gpu_layers": layers, "n_gpu_layers_draft": layers}
    with pd.Speculator(*demo, n_ctx=1024, **sizes) as spec:
        return spec.run(messages=prompt, max_tokens=96, **options)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_speculation_on_the_gpu_gives_its_plain_tokens_or_a_near_tie(demo: tuple[Path, Path], prompt: str) -> None:
    ours, plain = (reply(demo, prompt, -1, speculate=speculate) for speculate in (True, False))
    at = first_difference(ours.tokens, plain.tokens)
    if at is not None:
        assert gap(demo, prompt, plain.tokens[:at], ours.tokens[at], -1) < WIDTH_TIE
    assert ours.stats.mean_len > 1.5


@pytest.mark.parametrize("prompt", PROMPTS)
def test_gpu_gives_the_tokens_of_the_cpu_or_a_near_tie(demo: tuple[Path, Path], prompt: str) -> None:
    gpu, cpu = (reply(demo, prompt, layers) for layers in (-1, 0))
    at = first_difference(gpu.tokens, cpu.tokens)
    if at is not None:
        assert gap(demo, prompt, cpu.tokens[:at], gpu.tokens[at], 0) < DEVICE_TIE


def gap(demo: tuple[Path, Path], prompt: str, said: tuple[int, ...], rival: int, layers: int) -> float:
    """How far a token's logit is below the best one, with that many layers on the GPU."""
    with (
        pd.Model(demo[0], n_gpu_layers=layers) as model,
        pd.Speculator(model, n_ctx=1024, backend_argmax=False) as spec,
    ):
        text = model.apply_chat_template(prompt)
        spec.prefill([*model.tokenize(text, add_special=False), *said])
        spec.verify([])
        row = spec.logits()[0]
        return float(row.max() - row[rival])


def test_every_row_of_a_batch_carries_its_own_argmax(demo: tuple[Path, Path]) -> None:
    chosen = {}
    for on in (True, False):
        with pd.Speculator(demo[0], n_ctx=512, n_max=15, backend_argmax=on) as spec:
            tokens = spec.target.tokenize(
                "The quick brown fox jumps over the lazy dog and runs far away from it into the dark green woods."
            )
            for width in (1, 2, 5, 8, 16):
                spec.reset()
                spec.prefill(tokens[:2])
                rows = spec.verify(tokens[2 : 1 + width]).chosen
                chosen[on, width] = rows
                if not on:
                    assert tuple(np.argmax(spec.logits(), axis=1)) == rows
    for width in (1, 2, 5, 8, 16):
        assert chosen[True, width] == chosen[False, width]
        assert len(chosen[True, width]) == width
    assert len(set(chosen[True, 16])) > 4


def test_texts_side_by_side_are_those_of_each_alone_or_a_near_tie(demo: tuple[Path, Path]) -> None:
    """Prompts go along with the rounds of others, in batches of other widths than alone."""
    jobs = [
        {"messages": prompt, "max_tokens": n} for prompt, n in zip(PROMPTS * 3, (40, 60, 20, 30, 10, 50, 60, 25, 45))
    ]
    with pd.Speculator(*demo, n_ctx=1024, cache_ram=0) as spec:
        found = [one.result for one in spec.run_many(jobs, n_parallel=4)]
        alone = [spec.run(**job) for job in jobs]
    for job, ours, own in zip(jobs, found, alone):
        assert ours is not None
        at = first_difference(ours.tokens, own.tokens)
        if at is not None:
            assert gap(demo, job["messages"], own.tokens[:at], ours.tokens[at], -1) < DEVICE_TIE
    assert sum(one.stats.draft_n_accepted for one in found) > 0.8 * sum(one.stats.draft_n_accepted for one in alone)


def test_surplus_rows_of_short_prompts_are_taken_back(demo: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """They make batches of few sizes, whose graphs are kept; results are those of the batch as it is."""
    specs = []
    for few_shapes in (-1, 0):
        fields = {"few_shapes": few_shapes}
        monkeypatch.setattr(_open, "engine_fields", lambda params, fields=fields: {**engine_fields(params), **fields})
        specs.append(pd.Speculator(*demo, n_ctx=200, backend_argmax=False, cache_ram=0))
    with specs[0] as ours, specs[1] as plain:
        assert [spec._session.engine.info["few_shapes"] for spec in specs] == [1, 0]
        ids = ours.target.tokenize("The tide comes in twice a day. " * 40)[:200]
        for n in (2, 15, 16, 17, 18, 33, 64, 65, 66, 190, 198):
            for spec in specs:
                spec.reset()
                spec.prefill(ids[:n])
                spec.verify([])
                assert (spec.state.n_past, spec.state.n_past_draft) == (n, n)
            off = ours.logits() - plain.logits()
            # A single row and sixteen go through other kernels; of 49,152 logits one may be further off.
            assert float(np.sqrt(np.mean(off * off))) < (DEVICE_TIE if n == 2 else 0.05), n
            assert ours.draft().tokens[:1] == plain.draft().tokens[:1], n


def test_one_launch_drafts_as_llama_cpps_graph_does(demo: tuple[Path, Path]) -> None:
    """The two multiply other numbers of rows at once, in other kernels: some choice turns, acceptance does not."""
    n, n_same, accepted = 0, 0, [0, 0]
    with pd.Speculator(*demo, n_ctx=1024) as ours, pd.Speculator(*demo, n_ctx=1024, fused_draft=False) as reference:
        assert (ours.fused_draft, reference.fused_draft) == (True, False)
        for prompt in PROMPTS:
            for spec in (ours, reference):
                spec.prefill(spec.target.tokenize(spec.target.apply_chat_template(prompt), add_special=False))
            for _ in range(24):
                a, b = ours.draft(), reference.draft()
                n += len(b.tokens)
                n_same += sum(x == y for x, y in zip(a.tokens, b.tokens))
                verdicts = [spec.verify(b) for spec in (ours, reference)]
                assert verdicts[0].chosen == verdicts[1].chosen
                accepted[0] += first_difference(a.tokens, verdicts[1].accepted) or len(verdicts[1].accepted)
                accepted[1] += len(verdicts[1].accepted)
    assert n_same > 0.85 * n, (n_same, n)
    assert accepted[0] > 0.9 * accepted[1], accepted


# where models lie -----------------------------------------------------------------------------------------------------


def gpus() -> list[str]:
    return [device.name for device in pd.devices() if device.is_gpu]


def free_memory() -> int:
    return sum(device.memory_free for device in pd.devices() if device.is_gpu)


def weights_on(spec: pd.Speculator, device: str) -> tuple[int, int]:
    row = next((row for row in spec.memory.devices if row.device == device), None)
    return (row.target_weights, row.draft_weights) if row else (0, 0)


@pytest.mark.parametrize("draft_on", ["CPU", "GPU"])
@pytest.mark.parametrize("target_on", ["CPU", "GPU"])
def test_a_draft_may_lie_elsewhere_than_its_target(demo: tuple[Path, Path], target_on: str, draft_on: str) -> None:
    """It reads the target's features and its head there, which are copied over."""
    names = {"CPU": "CPU", "GPU": gpus()[0]}
    placed = {"devices": names[target_on], "devices_draft": names[draft_on]}
    with pd.Speculator(*demo, n_ctx=1024, **placed) as spec:
        assert weights_on(spec, names[target_on])[0] > 90e6
        assert weights_on(spec, names[draft_on])[1] > 13e6
        assert spec.fused_draft or (target_on, draft_on) == ("CPU", "GPU")  # its head is laid out for the CPU
        found = spec.run(messages=PROMPTS[0], max_tokens=96)
    wanted = reply(demo, PROMPTS[0], -1 if target_on == "GPU" else 0, speculate=False)
    at = first_difference(found.tokens, wanted.tokens)
    if at is not None:
        layers = -1 if target_on == "GPU" else 0
        assert gap(demo, PROMPTS[0], wanted.tokens[:at], found.tokens[at], layers) < WIDTH_TIE
    assert found.stats.mean_len > 1.5


def test_llama_cpps_graph_on_the_cpu_cannot_read_a_head_on_a_gpu(demo: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match=f"can't read the target's on {gpus()[0]}; name that in devices_draft"):
        pd.Speculator(*demo, n_ctx=512, devices=gpus()[0], devices_draft="CPU", fused_draft=False)


def test_the_draft_follows_its_target(demo: tuple[Path, Path]) -> None:
    for name in gpus():
        with pd.Speculator(*demo, n_ctx=512, devices=name) as spec:
            assert spec.fused_draft
            assert spec.draft_model is not None
            assert spec.draft_model.info.device == spec.target.info.device == name


@pytest.mark.parametrize("options", [{}, {"split_mode": "none"}, {"tensor_split": "even"}], ids=repr)
def test_memory_is_told_by_device(demo: tuple[Path, Path], options: dict[str, object]) -> None:
    chosen: dict[str, object] = {**options}
    if "tensor_split" in chosen:
        chosen["tensor_split"] = [1] * len(gpus())
    with pd.Speculator(*demo, n_ctx=1024, **chosen) as spec:  # type: ignore[arg-type]
        spec.run(messages=PROMPTS[1], max_tokens=32)
        memory = spec.memory
    on_gpu = [row for row in memory.devices if row.device in gpus()]
    assert len(on_gpu) == (1 if options == {"split_mode": "none"} else len(gpus()))
    assert sum(row.target_kv for row in on_gpu) == memory.total.target_kv == 2 * 2 * 30 * 3 * 64 * 1024
    assert memory.devices[-1].device == "CPU"
    assert all(row.mapped == 0 for row in on_gpu)


def test_what_generation_needs_is_there_once_it_is_open(demo: tuple[Path, Path]) -> None:
    """The largest batches ran at open, so kernels have the memory that they work in."""
    with pd.Speculator(*demo, n_ctx=2048) as spec:
        before = free_memory()
        assert (spec.state.n_prefilled, spec.state.n_injected) == (0, 0)
        spec.prefill(list(range(100, 1100)))
        for _ in range(8):
            spec.verify(spec.draft())
        assert before - free_memory() < 16 << 20


def test_a_context_that_does_not_fit_on_a_gpu_is_refused(demo: tuple[Path, Path]) -> None:
    with pytest.raises(MemoryError, match=rf"n_ctx=200000000 needs .* on {gpus()[0][:4]}.* lower n_ctx to about \d+"):
        pd.Speculator(*demo, n_ctx=200_000_000)
    with pd.Speculator(*demo, n_ctx=512) as spec:
        assert spec.run("The", max_tokens=2, ignore_eos=True).tokens
