"""Load on a running scheduler, on one started here, or on an engine alone, and what was measured."""
