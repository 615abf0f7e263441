"""What only a GPU needs: captured steps, memory sizes, warm-up, and compiling ahead of a start."""
