"""Pictures in prompts: patches, vision towers, and their states."""
