"""What is pushed: PEFT folders, read strictly and checked against the base model."""
