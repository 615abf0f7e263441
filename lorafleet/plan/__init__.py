"""The fleet that a load needs, searched with the scheduler's simulator: `lorafleet plan`."""
