"""What trains and measures the miniature of `bridges.miniature`: run as `python -m scripts.miniature.build`."""
