"""The help of the long commands in sections."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from dbksvd_dask.cli import fit
from dbksvd_dask.cli.main import cli
from dbksvd_dask.cli.translate import typed_command

SECTIONED = ("capture", "import", "shuffle", "fit", "encode", "loss", "export neuronpedia")


@pytest.mark.parametrize("name", SECTIONED)
def test_every_option_is_in_exactly_one_section_of_the_help(name):
    command = typed_command(cli, name.split())
    first, *others = command.sections
    text = f"{first}:" + CliRunner().invoke(command, ["--help"]).output.partition(f"\n{first}:")[2]
    options = [option for p in command.params for option in p.opts if option.startswith("--")]
    for option in options:
        assert len(re.findall(rf"^  (?:-\w, )?{option}(?![\w-])", text, re.MULTILINE)) == 1, option
    headings = [line[:-1] for line in text.splitlines() if line.endswith(":") and line[:-1] in command.sections]
    assert headings == [first, *others]


def test_a_command_with_many_options_has_sections():
    for name in cli.list_commands(click.Context(cli)):
        command = typed_command(cli, [name])
        assert len(command.params) < 15 or hasattr(command, "sections"), name


def test_an_option_that_no_section_names_is_shown_too(monkeypatch):
    monkeypatch.setattr(fit.command, "sections", {"Essentials": ("k",), "Output": ()})
    assert "--n-atoms" in CliRunner().invoke(fit.command, ["--help"]).output.partition("Output:")[2]
