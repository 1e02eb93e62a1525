"""Sphinx: pages in Markdown (MyST), API pages from the docstrings."""

import re
from pathlib import Path

import swpipe
import swpipe.tasks.torchrec.pipelines.drop_in  # TorchRec logs what it loads, from here unseen

project = "swpipe"
author = "swpipe authors"
copyright = "2026, swpipe authors"
version = release = swpipe.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "examples"]

autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Fields of dataclasses are described in the class's docstring; this keeps them from showing twice.
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"swpipe {version}"


def show_drawings(app, what, name, obj, options, lines):
    """Keep the indented drawings of a module's docstring as they are."""
    if what != "module":
        return
    shown, at_margin = [], True
    for line, before in zip(lines, ["", *lines], strict=False):
        starts_block = line.startswith("    ") and not before.strip()
        if starts_block and at_margin and not (shown[-2:] and shown[-2].endswith("::")):
            shown += ["::", ""]
        if line.strip():
            at_margin = not line.startswith(" ")
        shown.append(line)
    lines[:] = shown


def share_table(app, docname, source):
    """Give the start page README's table of what to read, with the titles of pages as links."""
    if docname == "index":
        readme = Path(__file__).parent.parent.joinpath("README.md").read_text(encoding="utf-8")
        table = readme.split("## What to read when")[1].split("\n## ")[0]
        table = re.sub(r"`docs/([\w/-]+\.md)`", r"[](\1)", table)
        source[0] = source[0].replace("<!-- README's table -->", table.strip())


def setup(app):
    """Register the functions; napoleon has the default priority of 500, and must come later."""
    app.connect("autodoc-process-docstring", show_drawings, priority=400)
    app.connect("source-read", share_table)
