"""What a prompt may hold beside a line of text: pictures, conversations; how it is read, and becomes tokens."""
