"""What each tenant may take of what is shared: its limits, its rates, and who is refused for them."""
