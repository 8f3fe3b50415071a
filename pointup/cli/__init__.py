"""The subcommands of `pointup`: parsing of options, input files, progress and printed results."""
