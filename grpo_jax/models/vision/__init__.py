"""Pictures in a prompt: patches, the families' towers, and where their states stand in the text."""
