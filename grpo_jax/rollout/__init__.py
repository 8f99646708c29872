"""What is between a prompt and its reward."""
