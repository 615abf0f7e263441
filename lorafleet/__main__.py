"""`python -m lorafleet` is the `lorafleet` command."""

import sys

from lorafleet.cli import main

if __name__ == "__main__":
    sys.exit(main())
