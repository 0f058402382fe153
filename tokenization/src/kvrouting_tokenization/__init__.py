"""Text to token ids exactly as the model's own files say: tokenizer and chat template."""

from kvrouting_tokenization.byte_tokenizer import ByteTokenizer
from kvrouting_tokenization.loading import TokenizerNotFoundError, load_tokenizer
from kvrouting_tokenization.tokenizer import ChatRequestError, Tokenizer

__all__ = ["ByteTokenizer", "ChatRequestError", "Tokenizer", "TokenizerNotFoundError", "load_tokenizer"]
