"""Decides what is sampled, trained and updated; no torch, no vllm."""
