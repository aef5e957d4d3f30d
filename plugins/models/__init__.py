"""Model families with their tokenizers."""
