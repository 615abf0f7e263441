"""A model of executors: their seats, slots, copies and loads, and the time that steps take."""
