"""The command groups of `lorafleet`, one file each; lorafleet/cli.py puts them together."""
