"""How Sphinx builds these pages: `make docs`. The build needs no network.

Formulas become MathML, which browsers draw themselves. Links into other projects come from `link_targets.py`.
Docstrings are plain text with `code` in backticks, not reStructuredText; `plain_docstring` makes them safe for Sphinx.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

sys.path.insert(0, str(Path(__file__).parent))
import link_targets

import skimkv

project = "skimkv"
author = "the skimkv authors"
copyright = "the skimkv authors, Apache-2.0"
release = version = skimkv.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx"]
exclude_patterns = ["figures/*.py", "examples"]
nitpicky = True  # a reference that leads nowhere is an error
nitpick_ignore = [
    ("py:class", "skimkv.methods.base.S"),  # the type variable of Method: its kind of store
    ("py:class", "DeviceMap"),  # the values that load takes as device_map
]

myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True

intersphinx_mapping = link_targets.write(Path(__file__).parents[1] / "build" / "docs-links")

html_theme = "furo"
html_title = "skimkv"
html_static_path = ["_static"]
html_css_files = ["skimkv.css"]
html_copy_source = False
html_show_sourcelink = False


STARTS_PARAGRAPH = re.compile(r"(Raises|Returns|[a-z_]+( \([A-Z,]+\))?:) ")


def plain_docstring(lines: list[str]) -> list[str]:
    """Turn a docstring of the house into reStructuredText that says the same.

    `name` becomes a literal, everything else is escaped. A line that describes a parameter ("name: ...") or begins with
    Returns or Raises starts a paragraph. An indented block after an empty line is shown as it stands.
    """
    result: list[str] = []
    indented = False
    for line in lines:
        starts_block = line.startswith("    ") and (not result or not result[-1].strip() or indented)
        if line.strip():
            if starts_block and not indented:
                result += ["", "::", ""]
            elif indented and not starts_block:
                result.append("")
            indented = starts_block
        if not indented and STARTS_PARAGRAPH.match(line):
            result.append("")
        result.append(line if indented or not line.strip() else _plain_line(line))
    return result


def _plain_line(line: str) -> str:
    parts = re.split(r"(``[^`]+``|`[^`]+`)", line)
    return "".join(
        f"``{part.strip('`')}``" if part.startswith("`") else re.sub(r"([\\*|_`])", r"\\\1", part) for part in parts
    )


def _on_docstring(app: Any, what: str, name: str, item: object, options: object, lines: list[str]) -> None:
    lines[:] = plain_docstring(lines)


def _visit_math(translator: Any, node: nodes.Element) -> None:
    block = isinstance(node, nodes.math_block)
    try:
        mathml = tex2mathml(node.astext(), as_block=block)
    except Exception as error:  # tex2mathml raises several kinds; the build must name the formula
        raise ValueError(f"{node.source}:{node.line}: MathML cannot be made of {node.astext()!r}: {error}") from error
    translator.body.append(f'<div class="math">{mathml}</div>' if block else mathml)
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Register what this file adds to Sphinx."""
    app.connect("autodoc-process-docstring", _on_docstring)
    app.add_html_math_renderer("mathml", inline_renderers=(_visit_math, None), block_renderers=(_visit_math, None))


html_math_renderer = "mathml"
