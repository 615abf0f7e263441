"""The usage ledger as a scheduler keeps it: records in files of its own, shipped to Redis behind."""
