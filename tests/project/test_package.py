"""The wheel and the sdist install into an empty environment, and what is installed there trains a step from
another folder.

The environment sees the packages of the tests' environment (torch is gigabytes), but not the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import fp8compile
from tests.project.test_docs import ROOT

pytestmark = pytest.mark.slow

FILES = [path for path in (ROOT / "fp8compile").rglob("*") if path.is_file() and path.suffix != ".pyc"]
NAMES = {path.relative_to(ROOT).as_posix() for path in FILES}

# what somebody writes into the cells of a notebook: a model, the one changed line, a step
NOTEBOOK = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128))
compiled = torch.compile(model, backend="fp8")
compiled(torch.randn(64, 128)).square().mean().backward()

import fp8compile
print(fp8compile.__file__)
print(fp8compile.report(model).summary())
"""


def call(*command: str | Path, cwd: Path) -> str:
    """The stdout of a program that does not see the checkout."""
    hidden = {"PYTHONPATH", "PYTHONHOME", "FP8COMPILE_POLICY"}
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    how = {"capture_output": True, "text": True, "timeout": 500}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, **how)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel and an sdist of a copy of the checkout: building leaves files beside the sources."""
    folder = tmp_path_factory.mktemp("built")
    source, dist = folder / "source", folder / "dist"
    source.mkdir()
    for name in ("fp8compile", "tests/project"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        if (ROOT / file).exists():
            shutil.copy(ROOT / file, source)
    builder = folder / "builder"
    venv.create(builder, with_pip=True)
    call(builder / "bin" / "pip", "install", "-q", "build", "setuptools>=77", "wheel", cwd=folder)
    call(builder / "bin" / "python", "-m", "build", "--no-isolation", "--outdir", dist, source, cwd=folder)
    return {"wheel": next(dist.glob("*.whl")), "sdist": next(dist.glob("*.tar.gz")), "builder": builder}


@pytest.fixture(scope="module", params=["wheel", pytest.param("sdist", marks=pytest.mark.weekly)])
def python(
    request: pytest.FixtureRequest, built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The Python of an empty environment into which one of them was installed."""
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder / "environment", with_pip=True)
    python = folder / "environment" / "bin" / "python"
    package = built[request.param]
    if request.param == "sdist":  # pip would fetch setuptools for it
        wheels = folder / "wheels"
        pip = (built["builder"] / "bin" / "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
        call(*pip, "-w", wheels, package, cwd=folder)
        package = next(wheels.glob("*.whl"))
    call(python, "-m", "pip", "install", "-q", "--no-deps", package, cwd=folder)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(call(python, "-c", code, cwd=folder).strip())
    # a folder in a .pth file comes after the environment's own, and the .pth files in it are not read: no
    # checkout from there
    (packages / "torch-and-others.pth").write_text(sysconfig.get_path("purelib"))
    return python


def inside(package: Path) -> set[str]:
    """The names of the files in an archive, below the folder of the version."""
    if package.suffix == ".whl":
        return set(zipfile.ZipFile(package).namelist())
    with tarfile.open(package) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_all_of_the_package_is_inside_and_no_test(built: dict[str, Path], kind: str) -> None:
    names = inside(built[kind])
    assert built[kind].name.startswith(f"fp8compile-{fp8compile.__version__}")
    assert len(NAMES) > 200 and not NAMES - names, NAMES - names
    assert not {name.split("/")[0] for name in names} & {"tests", "benchmarks", "docs"}
    assert not any("__pycache__" in name for name in names)


@pytest.mark.weekly
def test_the_command_line_is_installed(python: Path, tmp_path: Path) -> None:
    program = python.with_name("fp8compile")
    assert f"fp8compile {fp8compile.__version__}" in call(program, "--version", cwd=tmp_path)
    assert fp8compile.__version__ in call(program, "env", cwd=tmp_path)
    assert "[[rules]]" in call(program, "policy", "show", "llama", cwd=tmp_path)


@pytest.mark.weekly
def test_three_lines_train(python: Path, tmp_path: Path) -> None:
    file, summary = call(python, "-c", NOTEBOOK, cwd=tmp_path).splitlines()
    assert Path(file).is_relative_to(python.parents[1]) and "100.0% of matmul FLOPs" in summary
