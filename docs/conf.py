"""How Sphinx builds these pages: ``make docs``. Nothing here needs a GPU or a network."""

import sys
from pathlib import Path

import warpwell

sys.path.insert(0, str(Path(__file__).parent / "site"))

project = "Warpwell"
copyright = "the Warpwell developers"
author = "the Warpwell developers"
release = warpwell.__version__

extensions = [
    "myst_parser",  # pages are Markdown
    "sphinx.ext.autodoc",  # the reference is made from docstrings
    "numpydoc",
    "names",  # docs/site/names.py: `Name` in a docstring
    "commands",  # docs/site/commands.py: the command line
]
html_theme = "furo"
pygments_dark_style = "monokai"  # the theme underlines modules, as if they were links
html_title = f"Warpwell {release}"
html_copy_source = False
html_show_sphinx = False
templates_path: list[str] = []
html_static_path = ["site/static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_fence_as_directive: list[str] = []

smartquotes = False  # quotes and dashes of help texts and docstrings are code

add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # docstrings tell types, shapes and units
# Python's own library documents the members that classes inherit from these.
_FOREIGN = "object, MutableMapping, Mapping, Collection, Container, Iterable, Sized, Sequence, Future, ABC, Protocol"
# Methods for launches, agents and schedulers, not for programs.
_INSIDE = (
    "kernel_struct, launch_begins, launch_ended, launch_continues, abort, interp_services, warpwell_place, settle, "
    "check_open, forked, channel, handle_of"
)
# A directive with members of its own switches these defaults off, because Sphinx prefers them to its list.
autodoc_default_options = {"members": True, "inherited-members": _FOREIGN, "exclude-members": _INSIDE}
default_role = "name"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
nitpicky = True
