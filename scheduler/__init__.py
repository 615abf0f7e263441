"""The scheduler: takes requests, groups them by adapter and sends them to executors. Never imports torch."""
