"""The usage ledger: its records, and `lorafleet usage`, which keeps one an answer and sums them."""
