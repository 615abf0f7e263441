"""The executors as this scheduler sees them: connections, reported seats and slots, resident versions."""
