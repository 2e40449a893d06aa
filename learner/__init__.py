"""Turns groups into weights; knows the wire, the transport and engine.core only."""
