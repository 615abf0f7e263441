"""What a base model's folder says, read here for every service: config, checkpoint files, tokens."""
