"""vendor/cuda.py finds a toolkit that can build for a card, among those installed. The toolkits here are scripts."""

from __future__ import annotations

from pathlib import Path

import cuda
import pytest

ENVIRON = {"PATH": ""}


def toolkit(folder: Path, release: str, complaint: str = "", unless: str = "") -> Path:
    """A compiler of that release in folder/bin. It fails with the complaint, unless its arguments hold a text."""
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(
        f"""#!/bin/sh
case "$*" in --version) echo "Cuda compilation tools, release {release}, V{release}.1"; exit 0;; esac
case "$*" in *"{unless or "no such text"}"*) exit 0;; esac
test -z "{complaint}" || {{ echo "{complaint}" >&2; exit 1; }}
"""
    )
    path.chmod(0o755)
    return path


def on_path(*compilers: Path) -> dict[str, str]:
    return {"PATH": ":".join(str(compiler.parent) for compiler in compilers)}


@pytest.fixture(autouse=True)
def _only_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "PLACES", ())


@pytest.mark.parametrize(
    ("version", "archs", "fits"),
    [
        ("11.8", [61], True),
        ("12.9", [61, 90], True),
        ("13.0", [61], False),
        ("13.0", [90, 70], False),
        ("13.0", [75, 90, 120], True),
        ("11.8", [90], True),
        ("11.8", [100], False),
        ("12.8", [100, 120], True),
        ("12.8", [121], False),
        ("11.7", [61], False),
        ("11.8", [35], False),
    ],
)
def test_each_toolkit_knows_its_architectures(version: str, archs: list[int], fits: bool) -> None:
    assert (cuda.refusal(version, archs) is None) == fits


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("61", [61]),
        ("61-virtual", [61]),
        ("90;;61-real", [90, 61]),
        ("90a", [90]),
        ("all", []),
        ("61, 120f", [61, 120]),
    ],
)
def test_architectures_are_read_as_cmake_writes_them(text: str, numbers: list[int]) -> None:
    assert cuda.arch_numbers(text) == numbers


@pytest.mark.parametrize("text", ["sm_61", "compute_61", "6.1", "-1", "61;sm_90", "99999999999", "6", "\u0666\u0661"])
def test_what_is_no_architecture_is_refused(text: str) -> None:
    with pytest.raises(cuda.CudaError, match=r"is no architecture\nnext: give the compute capability without the dot"):
        cuda.choose(text, environ=ENVIRON)


def test_the_first_on_path_that_can_is_taken(tmp_path: Path) -> None:
    new, old = toolkit(tmp_path / "new", "13.0"), toolkit(tmp_path / "old", "12.4")
    assert cuda.choose("61", environ=on_path(new, old)).nvcc == old
    assert cuda.choose("90", environ=on_path(new, old)).nvcc == new
    assert cuda.choose("61", environ=on_path(new, old)).version == "12.4"


def test_what_is_named_is_taken_or_refused(tmp_path: Path) -> None:
    new, old = toolkit(tmp_path / "new", "13.0"), toolkit(tmp_path / "old", "12.4")
    for environ in ({"CUDACXX": str(new)}, {"CUDA_PATH": str(tmp_path / "new")}):
        with pytest.raises(
            cuda.CudaError, match=r"CUDA 13.0 cannot build sm_61.*\nnext: install a CUDA toolkit from 11.8"
        ):
            cuda.choose("61", environ={**on_path(old), **environ})
    with pytest.raises(cuda.CudaError, match="no version"):
        cuda.choose("61", compiler="/bin/true", environ=on_path(old))


def test_a_host_compiler_is_found_where_the_default_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "HOST_COMPILERS", ("", "sh", "ls"))
    nvcc = toolkit(tmp_path, "11.8", "error: unsupported GNU version!", unless="-ccbin ls")
    assert cuda.choose("61", environ=on_path(nvcc)).host == "ls"


@pytest.mark.parametrize(
    ("complaint", "advice"),
    [
        (
            "error: -- unsupported GNU version! gcc versions later than 11",
            "next: install a g.. that this toolkit takes",
        ),
        ("fatal error: cublas_v2.h: No such file or directory", "next: install the headers of this toolkit's cuBLAS"),
        ("something else", "next: name a working compiler"),
    ],
)
def test_a_compiler_that_fails_is_named_with_what_it_said(tmp_path: Path, complaint: str, advice: str) -> None:
    nvcc = toolkit(tmp_path, "11.8", complaint)
    with pytest.raises(cuda.CudaError, match=advice) as caught:
        cuda.choose("61", environ=on_path(nvcc))
    assert complaint in str(caught.value)
    assert str(nvcc) in str(caught.value)


def test_a_toolkit_that_would_serve_and_fails_is_what_the_advice_is_about(tmp_path: Path) -> None:
    new, old = toolkit(tmp_path / "new", "13.0"), toolkit(tmp_path / "old", "12.4", "disk full")
    with pytest.raises(cuda.CudaError, match="disk full\nnext: name a working compiler"):
        cuda.choose("61", environ=on_path(new, old))


def test_without_any_the_places_are_named() -> None:
    with pytest.raises(cuda.CudaError, match=r"there is no nvcc\nnext: install a CUDA toolkit from 11.8 to 12.9"):
        cuda.choose("61", environ=ENVIRON)


def test_a_compiler_that_hangs_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIMIT_S", 0.2)
    slow, good = toolkit(tmp_path / "slow", "12.4"), toolkit(tmp_path / "good", "12.5")
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    assert cuda.choose("61", environ=on_path(slow, good)).nvcc == good


def test_what_a_compiler_prints_need_not_be_utf8(tmp_path: Path) -> None:
    nvcc = toolkit(tmp_path, "11.8")
    nvcc.write_text(
        "#!/bin/sh\ncase $* in --version) printf 'release 11.8 \\351';; *) printf '\\377' >&2; exit 1;; esac\n"
    )
    with pytest.raises(cuda.CudaError, match="does not compile:\n\ufffd"):
        cuda.choose("61", environ=on_path(nvcc))


def test_a_host_compiler_that_is_not_there_is_named(tmp_path: Path) -> None:
    new, old = toolkit(tmp_path / "new", "13.0"), toolkit(tmp_path / "old", "12.4")
    with pytest.raises(
        cuda.CudaError, match=r"(?s)there is no host compiler nosuch.*next: install it, or name another"
    ):
        cuda.choose("61", host="nosuch", environ=on_path(new, old))


def test_a_compiler_named_from_the_working_directory_is_found_from_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = toolkit(tmp_path, "12.4")
    monkeypatch.chdir(tmp_path)
    assert cuda.choose("61", environ={"CUDACXX": "./bin/nvcc"}).nvcc == nvcc
    with pytest.raises(cuda.CudaError, match=f"{tmp_path}/nvcc does not exist"):
        cuda.choose("61", environ={"CUDACXX": "./nvcc"})


def test_a_folder_of_that_name_is_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "nvcc").mkdir()
    with pytest.raises(cuda.CudaError, match="there is no nvcc"):
        cuda.choose("61", environ={"PATH": str(tmp_path)})
