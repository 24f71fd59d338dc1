"""Models for the tests, and the lines at the top of a report that say what was tested."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from laws import Models
from tiny import Files

import pyllama_dflash as pd

settings.register_profile(
    "default",
    deadline=None,  # a busy machine is no fault
    max_examples=15,
    derandomize=True,  # a failure comes back on the next run
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("default")


def pytest_report_header() -> list[str]:
    facts = pd.build_info()
    found = ", ".join(f"{device.name} ({device.description})" for device in pd.devices())
    return [
        f"pyllama_dflash: {facts['version']}, llama.cpp {facts['upstream_commit'][:9]}, patches {facts['patches']}",
        f"build: {facts['options']}; devices: {found or 'none'}",
    ]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Tiny models, written when first asked for."""
    return Files(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def models(files: Files) -> Iterator[Models]:
    """The same, open."""
    with closing(Models(files)) as models:
        yield models


@pytest.fixture(scope="session")
def pair(files: Files) -> tuple[Path, Path]:
    """Paths of a tiny target and its DFlash2 draft."""
    return files.pair()


@pytest.fixture(scope="session")
def demo() -> tuple[Path, Path]:
    """Paths of the demo pair; for tests that are marked `model`."""
    return pd.demo_pair()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Path]:
    """A folder in which no file may be left half written."""
    folder = tmp_path / "out"
    folder.mkdir()
    yield folder
    assert not list(folder.glob(".*"))


@pytest.fixture
def without_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handlers that a command adds would stay in this process."""
    monkeypatch.setattr("pyllama_dflash._cli_common.show_logs", lambda verbosity: None)
