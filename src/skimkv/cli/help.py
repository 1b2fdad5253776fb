"""How --help reads: a sentence, an example, and the options in groups under their rich_help_panel."""

from __future__ import annotations

import inspect
from typing import Any

from typer.core import TyperCommand, TyperGroup

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
LAST = "Other options"


def _write_text(command: Any, formatter: Any) -> None:
    """The docstring, its paragraphs filled; a paragraph that is indented (the example) is printed as it stands."""
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        formatter.write_paragraph()
        if paragraph.startswith("    "):
            formatter.write("".join(f"  {line.strip()}\n" for line in paragraph.splitlines()))
        else:
            formatter.write_text(paragraph)


def _write_options(command: Any, context: Any, formatter: Any) -> None:
    groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    last = []
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if record is None:
            continue
        if "--help" in param.opts or "--version" in param.opts:
            last.append(record)
        elif param.param_type_name == "argument":
            groups["Arguments"].append(record)
        else:
            groups.setdefault(param.rich_help_panel or "Options", []).append(record)
    for heading, records in {**groups, LAST: last}.items():
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)


class Command(TyperCommand):
    """A command whose help has an example and groups of options."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write what the command does, and its example."""
        _write_text(self, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options in their groups."""
        _write_options(self, ctx, formatter)


class Group(TyperGroup):
    """A group of commands whose help shows them under their rich_help_panel, each with its first sentence."""

    command_class = Command

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write what the group is for, and its example."""
        _write_text(self, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in their groups, then the options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            sentence = inspect.cleandoc(command.help or "").split("\n\n")[0].replace("\n", " ")
            groups.setdefault(command.rich_help_panel or "Commands", []).append((name, sentence))
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)
        _write_options(self, ctx, formatter)
