"""Where names of other projects are documented, for links in the API reference.

Sphinx usually downloads such an inventory from each project. The build here must work without a network, and Hugging
Face offers none; so the names that our signatures use stand in this table, and `write` makes inventories of them.
A name that is missing here fails the build: add it with the address of its page.
"""

from __future__ import annotations

import zlib
from pathlib import Path

PROJECTS = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "transformers": "https://huggingface.co/docs/transformers/",
}

# project -> (name, role, page); `$` at the end of a page stands for the name
TARGETS = {
    "python": [
        ("None", "data", "library/constants.html#None"),
        ("True", "data", "library/constants.html#True"),
        ("False", "data", "library/constants.html#False"),
        *(
            (name, "class", f"library/{page}")
            for name, page in {
                "bool": "functions.html#bool",
                "int": "functions.html#int",
                "float": "functions.html#float",
                "str": "stdtypes.html#str",
                "bytes": "stdtypes.html#bytes",
                "list": "stdtypes.html#list",
                "dict": "stdtypes.html#dict",
                "tuple": "stdtypes.html#tuple",
                "set": "stdtypes.html#set",
                "slice": "functions.html#slice",
                "type": "functions.html#type",
                "object": "functions.html#object",
                "pathlib.Path": "pathlib.html#pathlib.Path",
                "Path": "pathlib.html#pathlib.Path",
                "typing.NamedTuple": "typing.html#typing.NamedTuple",
                "typing.Generic": "typing.html#typing.Generic",
                "typing.Protocol": "typing.html#typing.Protocol",
                "typing.TypedDict": "typing.html#typing.TypedDict",
                "TypedDict": "typing.html#typing.TypedDict",
                "abc.ABC": "abc.html#abc.ABC",
                "collections.abc.Callable": "collections.abc.html#collections.abc.Callable",
                "collections.abc.Iterable": "collections.abc.html#collections.abc.Iterable",
                "collections.abc.Iterator": "collections.abc.html#collections.abc.Iterator",
                "collections.abc.Mapping": "collections.abc.html#collections.abc.Mapping",
                "collections.abc.Sequence": "collections.abc.html#collections.abc.Sequence",
                "contextlib.AbstractContextManager": "contextlib.html#contextlib.AbstractContextManager",
            }.items()
        ),
        ("ValueError", "exception", "library/exceptions.html#ValueError"),
        ("RuntimeError", "exception", "library/exceptions.html#RuntimeError"),
        ("typing_extensions.Unpack", "class", "library/typing.html#typing.Unpack"),
        ("typing.Any", "data", "library/typing.html#typing.Any"),
        ("collections.abc", "module", "library/collections.abc.html"),
    ],
    "torch": [
        ("torch.Tensor", "class", "tensors.html#$"),
        ("Tensor", "class", "tensors.html#torch.Tensor"),
        ("torch.dtype", "class", "tensor_attributes.html#$"),
        ("torch.device", "class", "tensor_attributes.html#$"),
        ("torch.Generator", "class", "generated/torch.Generator.html#$"),
        ("torch.nn.Module", "class", "generated/torch.nn.Module.html#$"),
        ("torch.nn.modules.module.Module", "class", "generated/torch.nn.Module.html#torch.nn.Module"),
        ("torch.compile", "function", "generated/torch.compile.html#$"),
        ("torch.cuda.CUDAGraph", "class", "generated/torch.cuda.CUDAGraph.html#$"),
        (
            "torch.nn.functional.scaled_dot_product_attention",
            "function",
            "generated/torch.nn.functional.scaled_dot_product_attention.html#$",
        ),
    ],
    "transformers": [
        ("transformers.PreTrainedModel", "class", "main_classes/model#$"),
        ("transformers.PreTrainedTokenizerBase", "class", "internal/tokenization_utils#$"),
        ("transformers.Cache", "class", "internal/generation_utils#$"),
        ("transformers.DynamicCache", "class", "internal/generation_utils#$"),
        ("transformers.AttentionInterface", "class", "internal/modeling_utils#$"),
        ("transformers.GenerationMixin.generate", "method", "main_classes/text_generation#$"),
        # the same classes as signatures name them: without a module, or by the module that defines them
        ("PreTrainedModel", "class", "main_classes/model#transformers.PreTrainedModel"),
        ("transformers.modeling_utils.PreTrainedModel", "class", "main_classes/model#transformers.PreTrainedModel"),
        ("transformers.cache_utils.Cache", "class", "internal/generation_utils#transformers.Cache"),
    ],
}


def write(folder: Path) -> dict[str, tuple[str, str]]:
    """Write one inventory for each project into `folder`; return the setting `intersphinx_mapping` for Sphinx."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for project, url in PROJECTS.items():
        lines = "".join(f"{name} py:{role} 1 {page} -\n" for name, role, page in TARGETS[project])
        head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        path = folder / f"{project}.inv"
        path.write_bytes(head.encode() + zlib.compress(lines.encode()))
        mapping[project] = (url, str(path))
    return mapping
