"""Make samples and verdicts; know the wire, the transport and engine.core only."""
