"""What a fleet will do, on virtual time: the scheduler's own decisions over a model of executors."""
