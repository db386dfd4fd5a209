"""The wheel contains the package and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.long


def test_a_wheel_works_without_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("anytime_nn-")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
    shipped = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "anytime").rglob("*.py")}
    assert shipped <= set(names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "docs"))]
    about = next((tmp_path / "installed").glob("*.dist-info/METADATA")).read_text()
    assert "\nName: anytime-nn\n" in about
    assert "\n# anytime\n" in about
    assert "](docs/" not in about  # links of the README would be broken on PyPI
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import anytime; assert anytime.__file__.startswith(sys.argv[1]), anytime.__file__\n"
        "from anytime.report import render\n"
        "found = anytime.evaluate(anytime.samples.cifar100_msdnet())\n"
        "from importlib import metadata\n"
        "assert metadata.version('anytime-nn') == anytime.__version__\n"
        "print(len(render(found, title='t', source='s')))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "installed")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert int(done.stdout) > 100_000
