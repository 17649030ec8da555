"""The directive ``commands``: a section for each command of ``warpwell``, made from its parsers."""

import argparse
import textwrap

from docutils import nodes
from docutils.parsers.rst import Directive
from parsers import commands, parser
from sphinx.application import Sphinx


class Commands(Directive):
    """All commands, with their arguments."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each."""
        return [self._section(each) for each in commands(parser())]

    def _section(self, command: argparse.ArgumentParser) -> nodes.section:
        section = nodes.section(names=[nodes.fully_normalize_name(command.prog)])
        section += nodes.title("", command.prog)
        self.state.document.note_implicit_target(section, section)
        if command.description:
            section += nodes.paragraph("", command.description)
        usage = textwrap.dedent(" " * 7 + command.format_usage().removeprefix("usage: ")).strip()
        section += nodes.literal_block(usage, usage, language="none")
        rows = [row for action in command._actions if (row := self._row(action)) is not None]
        if rows:
            section += nodes.definition_list("", *rows)
        return section

    def _row(self, action: argparse.Action) -> nodes.definition_list_item | None:
        if action.dest == "help" or action.help == argparse.SUPPRESS:
            return None
        value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest)
        value = value if isinstance(value, str) else " ".join(value)
        if action.option_strings and action.nargs == 0:
            text = ", ".join(action.option_strings)
        elif action.option_strings:
            text = f"{', '.join(action.option_strings)} {value if action.metavar or action.choices else value.upper()}"
        else:
            text = value
        description = (action.help or "") % {**vars(action), "prog": "warpwell"} if action.help else ""
        return nodes.definition_list_item(
            "", nodes.term("", "", nodes.literal("", text)), nodes.definition("", nodes.paragraph("", description))
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
