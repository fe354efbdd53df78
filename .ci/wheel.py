"""Builds the wheel, checks what is in it, and runs the documentation's code against it alone.

The wheel is installed with nothing but its dependencies in an empty environment, so this fails if
the library imports a package that it does not declare, or if an example in `README.md` or `docs/`
does not run. An editable install must make the programs importable from every folder.
"""

import pathlib
import runpy
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]


def build(folder: pathlib.Path) -> pathlib.Path:
    """Returns the wheel, built from a copy: setuptools leaves files in the tree that it builds.

    The source distribution is built too, and both are checked as a package index would.
    """
    source, out = folder / "source", folder / "dist"
    shutil.copytree(ROOT / "actjax", source / "actjax")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md"):
        shutil.copy(ROOT / name, source)
    shutil.copy(ROOT / "CITATION.cff", source)
    python = [sys.executable, "-m"]
    quiet = {"check": True, "stdout": subprocess.DEVNULL}
    subprocess.run([*python, "build", "--outdir", out, source], **quiet)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    subprocess.run([*python, "twine", "check", "--strict", wheel, sdist], check=True)
    subprocess.run([*python, "check_wheel_contents", wheel], check=True)
    return wheel


def superfluous(wheel: pathlib.Path) -> list[str]:
    """Returns the files of a wheel that are neither code of actjax, its data, nor metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    return [
        name
        for name in names
        if not name.split("/")[0].endswith(".dist-info")
        and name not in ("actjax/py.typed", "actjax/kernels/blocks.json")
        and not (name.startswith("actjax/") and name.endswith(".py"))
    ]


def puts_its_folder_on_the_path(source: pathlib.Path, environment: pathlib.Path) -> bool:
    """Returns whether an editable install makes all packages of a checkout importable."""
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "-e", source], check=True
    )
    seen = f"import sys; sys.exit({str(source)!r} not in sys.path)"
    return subprocess.run([python, "-I", "-c", seen]).returncode == 0


def main() -> None:
    """Builds, checks, installs and runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        wheel = build(folder)
        if extra := superfluous(wheel):
            sys.exit(f"{wheel.name} has files that no user needs: {', '.join(extra)}.")
        if not puts_its_folder_on_the_path(folder / "source", folder / "editable"):
            sys.exit("after `pip install -e .` the programs run in the checkout alone.")
        venv.create(folder / "empty", with_pip=True)
        python = folder / "empty" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True)
        script = ROOT / ".ci" / "snippets.py"
        needs_extras = runpy.run_path(str(script))["needs_extras"]
        pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        # `tests/test_pages.py` runs the others.
        pages = [page for page in pages if not needs_extras(page)]
        # Isolated from PYTHONPATH and from the checkout.
        subprocess.run([python, "-I", script, *pages], check=True, cwd=folder)


if __name__ == "__main__":
    main()
