"""The command line from Python: `main` runs one, `parse` and `config_of` make a configuration of its options."""

from lamella._command.main import main as main
from lamella._command.parser import config_of as config_of
from lamella._command.parser import parse as parse
