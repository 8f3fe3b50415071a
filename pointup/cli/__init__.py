"""What people type: the subcommands of `pointup`."""
