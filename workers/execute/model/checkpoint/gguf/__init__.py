"""GGUF files, as llama.cpp has them: each is unpacked once into an ordinary checkpoint directory in the cache."""
