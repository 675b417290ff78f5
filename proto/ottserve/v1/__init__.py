"""The wire contract: generated from `generation.proto` by `proto/generate.py`, never edited."""
