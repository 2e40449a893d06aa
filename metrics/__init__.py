"""Counts and draws, decides nothing."""
