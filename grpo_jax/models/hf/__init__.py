"""Read and write policies as Hugging Face folders: weights, adapters, tokenizers, exports."""
