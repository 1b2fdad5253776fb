"""Where the C header of the kernels lies, for programs that call them without Python."""

from pathlib import Path

from . import __path__ as _package


def include_dir() -> str:
    """Return the folder of `skimkv.h`, as an argument for a compiler's `-I`.

    An installed package has a folder `include` of its own, and the shared library that the header describes lies in the
    folder above it. Where the package runs from its source tree, this is the source tree's `csrc/include`.

    Raises:
        FileNotFoundError: the header is in neither place, so the installation is not complete.
    """
    source_tree = Path(__file__).parents[2] / "csrc" / "include"
    folders = [*(Path(folder) / "include" for folder in _package), source_tree]
    for folder in folders:
        if (folder / "skimkv.h").is_file():
            return str(folder)
    raise FileNotFoundError(f"skimkv.h is in none of {', '.join(map(str, folders))}: install skimkv again")
