"""What an answer's text must be: the constraint, the grammar that llguidance makes of it, the tokens."""
