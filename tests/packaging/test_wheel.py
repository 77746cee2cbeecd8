"""What a user gets from the wheel: two packages, all of their files, and nothing else."""

import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {"dllm_sched": ROOT / "dllm_sched", "dllm_sched_hf": ROOT / "adapters" / "dllm_sched_hf"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by way of the sdist: it shows that the sdist is complete, too."""
    out = tmp_path_factory.mktemp("dist")
    # Without isolation no network is needed: hatchling is one of the test extra's packages.
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_top_level_is_our_two_packages(files):
    tops = {name.partition("/")[0] for name in files}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(SOURCES)


def test_every_source_file_is_in_it_data_included(files):
    expected = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in SOURCES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    assert {name for name in files if ".dist-info/" not in name} == expected


@pytest.mark.parametrize("package", SOURCES)
def test_types_are_published(files, package):
    assert f"{package}/py.typed" in files


def test_box_model_is_in_it(files):
    """Weights, configuration and tokenizer: the main job runs from the wheel alone."""
    box = {name for name in files if name.startswith("dllm_sched_hf/box/")}
    for suffix in (".safetensors", "config.json", "adapter_config.json"):
        assert any(name.endswith(suffix) for name in box), f"no {suffix} in {sorted(box)}"


def test_size_stays_small(wheel):
    assert wheel.stat().st_size < 10_000_000


def test_check_wheel_contents(wheel):
    subprocess.run([sys.executable, "-m", "check_wheel_contents", str(wheel)], check=True, cwd=ROOT)


def test_core_needs_attrs_alone(wheel, files):
    (name,) = (name for name in files if name.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(name).decode())
    needs = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert [line.partition(">")[0] for line in needs] == ["attrs"]
    assert {"hf", "test"} <= set(metadata.get_all("Provides-Extra") or [])
