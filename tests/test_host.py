"""How much memory is left, as /proc and the control groups say it."""

from __future__ import annotations

import sys
from pathlib import Path

import child
import pytest

from pyllama_dflash._host import HostMemory, host_memory

GIB = 1 << 30
FREE, TOTAL = 12 * GIB, 16 * GIB


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n", encoding="ascii")
    return root


def machine(root: Path, **groups: dict[str, object]) -> Path:
    files: dict[str, object] = {"proc/meminfo": f"MemTotal: {TOTAL >> 10} kB\nMemAvailable: {FREE >> 10} kB"}
    for folder, values in groups.items():
        files |= {f"sys/fs/cgroup/{folder.replace('__', '/')}/{name}": value for name, value in values.items()}
    return write(root, files)


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    assert host_memory(FREE, TOTAL, tmp_path) == HostMemory(FREE, TOTAL)


def test_pages_of_files_count_as_free_and_swap_does_not(tmp_path: Path) -> None:
    machine(tmp_path)
    assert host_memory(TOTAL, TOTAL, tmp_path) == HostMemory(FREE, TOTAL)


def test_a_group_of_version_2(tmp_path: Path) -> None:
    limits = {"memory.max": 4 * GIB, "memory.current": 3 * GIB, "memory.stat": f"anon 1\ninactive_file {GIB}\nfile 5"}
    machine(tmp_path, a__b=limits, a={"memory.max": "max", "memory.current": 9 * GIB})
    write(tmp_path, {"proc/self/cgroup": "0::/a/b"})
    assert host_memory(TOTAL, TOTAL, tmp_path) == HostMemory(2 * GIB, 4 * GIB)


def test_a_group_whose_parent_is_tighter(tmp_path: Path) -> None:
    child_limits = {"memory.max": 8 * GIB, "memory.current": 0}
    machine(tmp_path, a={"memory.max": 2 * GIB, "memory.current": GIB}, a__b=child_limits)
    write(tmp_path, {"proc/self/cgroup": "0::/a/b"})
    assert host_memory(TOTAL, TOTAL, tmp_path) == HostMemory(GIB, 2 * GIB)


def test_a_container_that_sees_its_group_as_the_top(tmp_path: Path) -> None:
    machine(tmp_path)
    write(
        tmp_path,
        {"proc/self/cgroup": "0::/docker/x", "sys/fs/cgroup/memory.max": GIB, "sys/fs/cgroup/memory.current": 5},
    )
    assert host_memory(TOTAL, TOTAL, tmp_path) == HostMemory(GIB - 5, GIB)


def test_a_group_of_version_1(tmp_path: Path) -> None:
    limits = {
        "memory.limit_in_bytes": 6 * GIB,
        "memory.usage_in_bytes": 5 * GIB,
        "memory.stat": f"cache 7\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}",
    }
    machine(tmp_path, memory__x=limits)
    write(tmp_path, {"proc/self/cgroup": "9:name=systemd:/\n4:memory:/x\n0::/"})
    assert host_memory(TOTAL, TOTAL, tmp_path) == HostMemory(3 * GIB, 6 * GIB)


def test_a_group_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    machine(tmp_path, a={"memory.max": GIB, "memory.current": 2 * GIB})
    write(tmp_path, {"proc/self/cgroup": "0::/a"})
    assert host_memory(TOTAL, TOTAL, tmp_path).available == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs rlimits")
def test_the_limit_of_the_process() -> None:
    code = """
        import resource
        from pyllama_dflash._host import host_memory
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        print(0 < host_memory(1 << 40, 1 << 40).available < 4 << 30)
    """
    assert child.output(code).split() == ["True"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs rlimits")
def test_files_that_are_to_be_mapped_take_of_that_limit_and_of_nothing_else(tmp_path: Path) -> None:
    code = """
        import resource
        from pyllama_dflash._host import host_memory
        print(host_memory(1 << 30, 1 << 30, mapped=1 << 40).available == host_memory(1 << 30, 1 << 30).available)
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        left, beside = host_memory(1 << 40, 1 << 40), host_memory(1 << 40, 1 << 40, mapped=1 << 30)
        print(abs(left.available - beside.available - (1 << 30)) < 1 << 24)
    """
    assert child.output(code).split() == ["True", "True"]
