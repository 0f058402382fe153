"""Text to token ids exactly as the model's own files say: tokenizer and chat template."""
