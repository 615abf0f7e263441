"""The command groups of `lorafleet`, one file each, which `lorafleet/cli.py` puts together."""
