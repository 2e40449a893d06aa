"""Pure decisions: standard library only, no asyncio, no clock, no I/O; time and randomness are passed in."""
