"""Builds the simulated accelerator and installs it into this interpreter's environment.

`make setup` runs it.  The package `torch_sim` in site-packages then holds the compiled backend and
its Python module; an entry point beside it lets torch load the backend.  A key of sources and
torch's version says whether it is up to date.  Without a C++ compiler nothing is built: one line
says so, and the tests marked `sim` are skipped.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
SITE = Path(sysconfig.get_paths()["purelib"])
PACKAGE, INFO = SITE / "torch_sim", SITE / "torch_sim-0.dist-info"
AUTOLOAD = "torch_sim_autoload.py"
NO_COMPILER = "there is no C++ compiler (install g++, then: make setup)"
NOT_BUILT = "the simulated accelerator is not built (make setup)"
OUTDATED = "the simulated accelerator is older than its sources (make setup)"


def main() -> int:
    if not (why := why_missing()):
        return 0
    compiler = find_compiler()
    if compiler is None:
        print(f"No simulated accelerator: {NO_COMPILER}.  Tests marked `sim` will be skipped.")  # noqa: T201
        return 0
    print(f"Building the simulated accelerator, in some 30 s: {why}.")  # noqa: T201
    with tempfile.TemporaryDirectory(dir=SITE.parent) as folder:
        library = Path(folder) / "sim.so"
        compile_backend(compiler, library)
        install(library)
    return 0


def why_missing() -> str:
    """Return why the tests cannot use the simulated accelerator; "" if they can."""
    built = PACKAGE / "key"
    if not built.exists():
        return NOT_BUILT if find_compiler() else NO_COMPILER
    return "" if built.read_text() == key() else OUTDATED


def key() -> str:
    """Return a hash of all that the installed package is made from."""
    told = hashlib.sha256(version("torch").encode())
    sources = [*HERE.glob("backend/*"), *HERE.glob("torch_sim/*.py")]
    for path in sorted([*sources, HERE / AUTOLOAD, HERE / "build.py"]):
        told.update(path.name.encode() + b"\0" + path.read_bytes())
    return told.hexdigest()


def load() -> None:
    """Load the backend into this process, with one device, but not into its child processes.

    Torch and its libraries take whatever accelerator there is, so a process that tests the CPU
    must have none.
    """
    if "torch_sim" in sys.modules:
        return
    import torch
    import torch_sim_autoload

    os.environ["SIM_DEVICES"] = "1"
    try:
        torch_sim_autoload.load()
        assert torch.sim.device_count() == 1  # reads the variables, once and for all
    finally:
        del os.environ["SIM_DEVICES"]


def find_compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def compile_backend(compiler: str, library: Path) -> None:
    torch = torch_folder()
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra"]
    for headers in ("include", "include/torch/csrc/api/include"):
        command += ["-isystem", str(torch / headers)]
    command += [str(HERE / "backend/sim.cpp"), "-o", str(library)]
    command += [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    subprocess.run(command, check=True)


def torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def install(library: Path) -> None:
    """Install the package; the key comes last, so that half of an installation counts as none."""
    for folder in (PACKAGE, INFO):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(HERE / "torch_sim", PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.move(library, PACKAGE / "sim.so")
    shutil.copy(HERE / AUTOLOAD, SITE / AUTOLOAD)
    INFO.mkdir()
    (INFO / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-sim\nVersion: 0\n")
    (INFO / "entry_points.txt").write_text("[torch.backends]\nsim = torch_sim_autoload:load\n")
    (PACKAGE / "key").write_text(key())


if __name__ == "__main__":
    sys.exit(main())
