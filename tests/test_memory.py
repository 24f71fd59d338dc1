"""What a Speculator says it keeps is what its allocators keep, and what a dry run says beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from laws import Models
from tiny import D_HEAD, N_VOCAB, Draft, Target

import pyllama_dflash as pd
from pyllama_dflash import _fit
from pyllama_dflash.memory import KINDS
from pyllama_dflash.params import LoadParams

CPU_ONLY = not any(device.is_gpu for device in pd.devices())
PROMPT = "the quick brown fox jumps over the lazy dog"
HALVES = {"f32": 2, "f16": 1}


def cache_of(model: pd.Model, n_cells: int) -> int:
    """Bytes of K and V in F16."""
    heads = int(model.meta(f"{model.meta('general.architecture')}.attention.head_count_kv") or 0)
    return 2 * 2 * model.info.n_layer * heads * D_HEAD * n_cells


@pytest.mark.parametrize("options", [{}, {"fused_draft": False}], ids=["our graph", "llama.cpp's"])
def test_caches_have_the_size_that_their_shapes_say(models: Models, options: dict[str, Any]) -> None:
    with models.fresh(Target(), Draft(), n_ctx=512, **options) as spec:
        assert spec.draft_model is not None
        total = spec.memory.total
        assert total.target_kv == cache_of(spec.target, 512)
        spare = 1 if spec.fused_draft else 0
        assert total.draft_kv == cache_of(spec.draft_model, 512 + spare)


def test_what_is_on_each_device_adds_up(models: Models) -> None:
    with models.fresh(Target(), Draft()) as spec:
        spec.run(PROMPT, max_tokens=40)
        memory = spec.memory
    assert memory.devices[-1].device == "CPU"
    for kind in (*KINDS, "mapped"):
        assert getattr(memory.total, kind) == sum(getattr(row, kind) for row in memory.devices)
    assert memory.total.total == sum(row.total for row in memory.devices)
    assert min(getattr(memory.total, kind) for kind in KINDS) > 0
    named = {device.name for device in pd.devices()}
    assert {row.device for row in memory.devices} <= named
    assert memory.to_dict()["total"]["target_kv"] == memory.total.target_kv


@pytest.mark.skipif(not CPU_ONLY, reason="other backends lay weights out otherwise")
def test_weights_are_mapped_or_read(models: Models) -> None:
    for use_mmap in (True, False):
        with models.fresh(Target(), Draft(), use_mmap=use_mmap) as spec:
            memory = spec.memory.total
            sizes = [spec.target.info.n_bytes, spec.draft_model.info.n_bytes if spec.draft_model else 0]
        assert [memory.target_weights >= sizes[0], memory.draft_weights >= sizes[1]] == [True, True]
        assert memory.mapped == (memory.target_weights + memory.draft_weights if use_mmap else 0)


def test_compute_buffers_hold_the_graphs_that_are_kept(models: Models) -> None:
    with models.fresh(Target(), Draft()) as spec:
        before = spec.memory
        spec.prefill(PROMPT)
        for n in range(7):
            spec.verify([0] * n)
        after = spec.memory
    kept = [sum(graph.bytes for graph in memory.graphs) for memory in (before, after)]
    assert kept[1] > kept[0]
    assert after.total.target_compute - before.total.target_compute >= kept[1] - kept[0] > 0


@pytest.mark.parametrize("draft", [Draft(), None], ids=repr)
def test_picking_tokens_on_the_device_takes_little_memory(models: Models, draft: Draft | None) -> None:
    """S42: no more than the logits of the widest batch, of which the host then gets none."""
    totals = []
    for on_device in (True, False):
        with models.fresh(Target(), draft, backend_argmax=on_device, n_ubatch=64) as spec:
            spec.run(PROMPT, max_tokens=40)
            totals.append(spec.memory.total)
    logits = 4 * 64 * N_VOCAB
    assert totals[0].target_compute - totals[1].target_compute <= logits
    for kind in ("target_weights", "target_kv", "draft_weights", "draft_kv"):
        assert getattr(totals[0], kind) == getattr(totals[1], kind), kind
    assert totals[0].total <= totals[1].total + logits


@pytest.mark.parametrize("draft", [Draft(), Draft(version=1, window=16), Draft(reduced=True), None], ids=repr)
@pytest.mark.parametrize("options", [{}, {"n_ctx": 2048, "type_k": "q8_0"}, {"fused_draft": False}], ids=repr)
def test_a_dry_run_knows_what_opening_takes(models: Models, draft: Draft | None, options: dict[str, Any]) -> None:
    if draft is None:
        options = {name: value for name, value in options.items() if name != "fused_draft"}
    with models.fresh(Target(), draft, **options) as spec:
        found = spec.memory.devices
        plan = plan_of(spec)
    assert plan.n_ctx == spec.n_ctx
    assert [row.device for row in plan.devices] == [row.device for row in found]
    for ours, theirs in zip(plan.devices, found):
        for kind in ("target_kv", "draft_kv"):
            assert getattr(ours, kind) == getattr(theirs, kind), kind
        assert ours.draft_compute == pytest.approx(theirs.draft_compute, rel=0.2)
        # The taps of the target's layers and the graphs of small batches come on top.
        assert 0.3 * theirs.target_compute <= ours.target_compute <= theirs.target_compute * 1.05


def plan_of(spec: pd.Speculator, n_ctx: int | None = None) -> _fit.Plan:
    from pyllama_dflash._open import engine_fields

    options = engine_fields(spec.params)
    files = [_fit.File(str(m.path).encode(), LoadParams()) for m in (spec.target, spec.draft_model) if m]
    draft = files[1] if len(files) > 1 else None
    return _fit.make_plan(files[0], draft, {**options, "n_ctx": n_ctx or options["n_ctx"]})


@pytest.mark.parametrize("draft", [Draft(), None], ids=repr)
def test_a_long_context_is_foretold_from_shorter_ones(models: Models, draft: Draft | None) -> None:
    """The dry run measures up to 65536 cells; beyond, caches and buffers grow in proportion."""
    spec = models.get(Target(), draft)
    small, large = plan_of(spec, 1 << 16).devices[-1], plan_of(spec, 1 << 20).devices[-1]
    assert large.target_kv == 16 * small.target_kv
    assert large.draft_kv == pytest.approx(16 * small.draft_kv, rel=0.01)
    assert 4 * small.target_compute < large.target_compute <= 16 * small.target_compute


@pytest.mark.model
def test_the_demo_pair(demo: tuple[Path, Path]) -> None:
    with pd.Speculator(*demo, n_ctx=2048) as spec:
        spec.run("The", max_tokens=16)
        total = spec.memory.total
        plan = plan_of(spec)
    assert total.target_kv == 2 * 2 * 30 * 3 * 64 * 2048
    assert total.target_weights + total.draft_weights > 96e6
    foretold = sum(row.target_kv + row.draft_kv + row.draft_compute for row in plan.devices)
    assert foretold == total.target_kv + total.draft_kv + total.draft_compute
