"""Pictures in a prompt: patches, towers, and where their states stand in the text."""
