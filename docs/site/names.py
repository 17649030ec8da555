"""The role of single backticks in docstrings: a link where the name is a documented one, code in any case.

Docstrings put parameters, classes and functions between single backticks. Most are parameters, so a name without a page
is no mistake. A link that a page names as one (``{py:class}``) still has to exist.
"""

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.roles import XRefRole
from sphinx.util.nodes import make_refnode


class NameRole(XRefRole):
    """Refers to a Python object, if there is one of that name."""

    def process_link(
        self, env: BuildEnvironment, refnode: nodes.Element, has_explicit_title: bool, title: str, target: str
    ) -> tuple[str, str]:
        """Note where the name was used."""
        refnode["optional"] = True
        refnode["refdomain"] = "py"
        refnode["reftype"] = "obj"
        refnode["py:module"] = env.ref_context.get("py:module")
        refnode["py:class"] = env.ref_context.get("py:class")
        return title, target.removeprefix("ww.").removesuffix("()")


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element) -> nodes.Node | None:
    """Find the one documented class or exception that is called so; leave all other names as code."""
    if not node.get("optional"):
        return None
    target = node["reftarget"]
    domain = env.domains.python_domain
    if target.split(".")[-1][:1].isupper():
        found = [name for name in domain.objects if name.endswith(f".{target}")]
        if len(found) == 1:
            entry = domain.objects[found[0]]
            return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, found[0])
    return contnode


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the role."""
    app.add_role("name", NameRole(innernodeclass=nodes.literal))
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
